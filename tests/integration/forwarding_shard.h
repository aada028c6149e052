// ForwardingShard passes everything on to another shard: the base of shards that inject faults.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/base/exchange.h"

namespace thalweg {

class ForwardingShard : public Shard {
 public:
  explicit ForwardingShard(Shard& shard) : shard_(shard) {}

  absl::StatusOr<LinkSpeed> MeasureLink(TimePoint deadline) override {
    return shard_.MeasureLink(deadline);
  }
  absl::StatusOr<Membership> Join(const JoinRequest& request, TimePoint deadline) override {
    return shard_.Join(request, deadline);
  }
  absl::Status Attach(SessionToken token, const std::string& identity,
                      std::shared_ptr<NodeSink> sink) override {
    return shard_.Attach(token, identity, std::move(sink));
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
    return shard_.Contribute(token, std::move(contribution));
  }
  absl::Status Supply(SessionToken token, RoundResult result) override {
    return shard_.Supply(token, std::move(result));
  }

 private:
  Shard& shard_;
};

}  // namespace thalweg
