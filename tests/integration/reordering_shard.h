// ReorderingShard delivers one node's contributions late, out of order and sometimes twice.
#pragma once

#include <memory>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "core/base/exchange.h"
#include "core/base/mutex.h"
#include "core/base/thread.h"

namespace thalweg {

class ReorderingShard : public Shard {
 public:
  ReorderingShard(Shard& shard, uint64_t seed) : shard_(shard), rng_(seed) {
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

  absl::StatusOr<LinkSpeed> MeasureLink(TimePoint deadline) override {
    return shard_.MeasureLink(deadline);
  }
  absl::StatusOr<Membership> Join(const JoinRequest& request, TimePoint deadline) override {
    return shard_.Join(request, deadline);
  }
  absl::Status Attach(SessionToken token, std::shared_ptr<NodeSink> sink) override {
    return shard_.Attach(token, std::move(sink));
  }
  absl::Status RegisterBucket(SessionToken token, const BucketAnnouncement& bucket,
                              TimePoint deadline) override {
    return shard_.RegisterBucket(token, bucket, deadline);
  }
  absl::StatusOr<std::vector<float>> ReadResidual(SessionToken token, BucketId bucket,
                                                  uint32_t chunk, TimePoint deadline) override {
    return shard_.ReadResidual(token, bucket, chunk, deadline);
  }
  absl::Status WriteResidual(SessionToken token, BucketId bucket, uint32_t chunk,
                             std::span<const float> values, TimePoint deadline) override {
    return shard_.WriteResidual(token, bucket, chunk, values, deadline);
  }
  absl::StatusOr<ClockReading> Heartbeat(SessionToken token, TimePoint deadline) override {
    return shard_.Heartbeat(token, deadline);
  }
  void Leave(SessionToken token, const absl::Status& reason) override {
    shard_.Leave(token, reason);
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
      shard_.Contribute(next.first, std::move(next.second)).IgnoreError();
    }
  }

  Shard& shard_;
  Mutex mutex_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::mt19937_64 rng_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::pair<SessionToken, Contribution>> waiting_ ABSL_GUARDED_BY(mutex_);
  Thread courier_;
};

}  // namespace thalweg
