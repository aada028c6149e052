// ReorderingShard delivers one node's contributions late, out of order and sometimes twice.
#pragma once

#include <random>
#include <utility>
#include <vector>

#include "core/base/mutex.h"
#include "core/base/thread.h"
#include "tests/integration/forwarding_shard.h"

namespace thalweg {

class ReorderingShard : public ForwardingShard {
 public:
  ReorderingShard(Shard& shard, uint64_t seed) : ForwardingShard(shard), rng_(seed) {
    courier_ = Thread("courier", [this] { Deliver(); });
  }
  ~ReorderingShard() override {
    {
      MutexLock lock(mutex_);
      stopping_ = true;
      changed_.NotifyAll();
    }
    courier_.Join();
  }

  absl::Status Contribute(SessionToken token, Contribution contribution) override {
    MutexLock lock(mutex_);
    waiting_.emplace_back(token, std::move(contribution));
    changed_.NotifyAll();
    return absl::OkStatus();
  }

 private:
  // Waits for a few contributions (or a moment), then passes on a random one.
  void Deliver() {
    while (true) {
      std::pair<SessionToken, Contribution> next;
      {
        MutexLock lock(mutex_);
        const size_t enough = 1 + rng_() % 4;
        changed_.WaitUntil(mutex_, Now() + std::chrono::milliseconds(2),
                           [&] { return stopping_ || waiting_.size() >= enough; });
        if (waiting_.empty()) {
          if (stopping_) return;
          continue;
        }
        std::swap(waiting_[rng_() % waiting_.size()], waiting_.back());
        next = waiting_.back();
        if (rng_() % 4 != 0) waiting_.pop_back();  // otherwise it comes again
      }
      ForwardingShard::Contribute(next.first, std::move(next.second)).IgnoreError();
    }
  }

  Mutex mutex_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::mt19937_64 rng_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::pair<SessionToken, Contribution>> waiting_ ABSL_GUARDED_BY(mutex_);
  Thread courier_;
};

}  // namespace thalweg
