// For tests: a shard that admits everybody with a window of two chunks, and remembers what it
// hears.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/base/exchange.h"
#include "core/base/mutex.h"
#include "core/base/protocol.h"

namespace thalweg {

// Contribute, WaitForChunks, chunks and loss_scales are thread-safe.
class FakeShard : public Shard {
 public:
  absl::StatusOr<Membership> Join(const JoinRequest& request, TimePoint) override {
    joined = request;
    if (!refusal.ok()) return refusal;
    return Membership{
        7, 1, kMinChunkBytes, 2, weight, agreed_link, agreed_costs, agreed_shares, agreed_forecast};
  }
  absl::Status Attach(SessionToken, const std::string& identity,
                      std::shared_ptr<NodeSink> node) override {
    attached_identity = identity;
    sink = std::move(node);
    return absl::OkStatus();
  }
  absl::Status RegisterBucket(SessionToken, const BucketAnnouncement& bucket, TimePoint) override {
    placements.push_back(bucket.placement);
    return absl::OkStatus();
  }
  absl::StatusOr<LinkSpeed> MeasureLink(TimePoint) override {
    ++num_measurements;
    return link;
  }
  absl::Status Contribute(SessionToken, Contribution contribution) override {
    {
      MutexLock lock(mutex_);
      chunks_.push_back(contribution.id);
      loss_scales_.push_back(contribution.loss_scale);
      changed_.NotifyAll();
    }
    if (on_contribute) on_contribute();
    return absl::OkStatus();
  }
  absl::Status Supply(SessionToken, RoundResult) override {
    return absl::UnimplementedError("nobody asks");
  }
  absl::StatusOr<std::vector<float>> ReadResidual(SessionToken, BucketId, uint32_t,
                                                  TimePoint) override {
    return std::vector<float>();
  }
  absl::Status WriteResidual(SessionToken, BucketId, uint32_t, std::span<const float>,
                             TimePoint) override {
    return absl::UnimplementedError("nobody asks");
  }
  absl::StatusOr<ClockReading> Heartbeat(SessionToken, TimePoint) override {
    ++num_heartbeats;
    if (!heartbeat.ok()) return heartbeat;
    return ClockReading{"a boot", 7};
  }
  void Leave(SessionToken, const absl::Status& reason) override { left.push_back(reason); }

  // Waits until there were `count` contributions; false at `deadline`.
  bool WaitForChunks(size_t count, TimePoint deadline) {
    MutexLock lock(mutex_);
    return changed_.WaitUntil(mutex_, deadline, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return chunks_.size() >= count;
    });
  }
  std::vector<RoundId> chunks() {
    MutexLock lock(mutex_);
    return chunks_;
  }

  std::vector<double> loss_scales() {  // of the chunks
    MutexLock lock(mutex_);
    return loss_scales_;
  }

  std::function<void()> on_contribute;  // called with no lock held; null: nothing
  absl::Status refusal, heartbeat;
  JoinRequest joined;
  std::string attached_identity;
  LinkSpeed link, agreed_link;
  uint32_t weight = 1;
  std::vector<CodecCost> agreed_costs;
  std::vector<uint32_t> agreed_shares;
  ShareForecast agreed_forecast;
  std::vector<uint64_t> placements;
  std::shared_ptr<NodeSink> sink;
  std::vector<absl::Status> left;
  int num_heartbeats = 0;
  int num_measurements = 0;

 private:
  Mutex mutex_;
  CondVar changed_;
  std::vector<RoundId> chunks_ ABSL_GUARDED_BY(mutex_);
  std::vector<double> loss_scales_ ABSL_GUARDED_BY(mutex_);
};

class NullSink : public NodeSink {
  void OnResult(RoundResult) override {}
  void OnFailed(absl::Status) override {}
};

}  // namespace thalweg
