// ReorderingMember delivers one node's contributions late, out of order and sometimes twice.
#pragma once

#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "core/base/mutex.h"
#include "core/base/thread.h"
#include "tests/integration/forwarding_shard.h"

namespace thalweg {

class ReorderingMember : public ForwardingMember {
 public:
  ReorderingMember(std::unique_ptr<Member> member, uint64_t seed)
      : ForwardingMember(std::move(member)), rng_(seed) {
    courier_ = Thread("courier", [this] { Deliver(); });
  }
  ~ReorderingMember() override {
    {
      MutexLock lock(mutex_);
      stopping_ = true;
      changed_.NotifyAll();
    }
    courier_.Join();
  }

  absl::Status Contribute(Contribution contribution) override {
    MutexLock lock(mutex_);
    waiting_.push_back(std::move(contribution));
    changed_.NotifyAll();
    return absl::OkStatus();
  }

 private:
  // Waits for a few contributions (or a moment), then passes on a random one.
  void Deliver() {
    while (true) {
      Contribution next;
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
      ForwardingMember::Contribute(std::move(next)).IgnoreError();
    }
  }

  Mutex mutex_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::mt19937_64 rng_ ABSL_GUARDED_BY(mutex_);
  std::vector<Contribution> waiting_ ABSL_GUARDED_BY(mutex_);
  Thread courier_;
};

// Makes the members of a ForwardingShard reordering, each with a seed of its own.
inline ForwardingShard::Wrap ReorderMembers(uint64_t seed) {
  return [seed](std::unique_ptr<Member> member) mutable {
    return std::make_unique<ReorderingMember>(std::move(member), seed++);
  };
}
inline std::unique_ptr<Shard> Reordering(Shard& shard, uint64_t seed) {
  return std::make_unique<ForwardingShard>(shard, ReorderMembers(seed));
}

}  // namespace thalweg
