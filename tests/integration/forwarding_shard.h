// ForwardingShard passes everything on to another shard: the base of shards that inject faults.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "core/exchange/shard.h"

namespace thalweg {

class ForwardingMember : public Member {
 public:
  explicit ForwardingMember(std::unique_ptr<Member> member) : member_(std::move(member)) {}

  const Terms& terms() const override { return member_->terms(); }
  absl::Status Register(const BucketAnnouncement& bucket, TimePoint deadline) override {
    return member_->Register(bucket, deadline);
  }
  absl::Status MakeGroup(const Group& group, TimePoint deadline) override {
    return member_->MakeGroup(group, deadline);
  }
  absl::Status Contribute(Contribution contribution) override {
    return member_->Contribute(std::move(contribution));
  }
  absl::Status Supply(RoundResult result) override { return member_->Supply(std::move(result)); }
  absl::StatusOr<std::vector<float>> ReadResidual(BucketId bucket, uint32_t chunk,
                                                  TimePoint deadline) override {
    return member_->ReadResidual(bucket, chunk, deadline);
  }
  absl::Status WriteResidual(BucketId bucket, uint32_t chunk, std::span<const float> values,
                             TimePoint deadline) override {
    return member_->WriteResidual(bucket, chunk, values, deadline);
  }
  absl::Status SetSettings(uint64_t number, const UpdateStep& step, TimePoint deadline) override {
    return member_->SetSettings(number, step, deadline);
  }
  absl::StatusOr<WeightsSlice> ReadWeights(BucketId bucket, uint32_t chunk, uint32_t slice,
                                           TimePoint deadline) override {
    return member_->ReadWeights(bucket, chunk, slice, deadline);
  }
  absl::Status WriteWeights(BucketId bucket, uint32_t chunk, uint32_t slice, WeightsSlice weights,
                            TimePoint deadline) override {
    return member_->WriteWeights(bucket, chunk, slice, std::move(weights), deadline);
  }
  absl::StatusOr<SnapshotReport> Snapshots(const SnapshotCall& call, TimePoint deadline) override {
    return member_->Snapshots(call, deadline);
  }
  absl::StatusOr<Pulse> Heartbeat(TimePoint deadline) override {
    return member_->Heartbeat(deadline);
  }
  void Leave(const absl::Status& reason) override { member_->Leave(reason); }

 private:
  const std::unique_ptr<Member> member_;
};

class ForwardingShard : public Shard {
 public:
  // `wrap` wraps the members, to inject faults.
  using Wrap = std::function<std::unique_ptr<Member>(std::unique_ptr<Member>)>;
  ForwardingShard(Shard& shard, Wrap wrap) : shard_(shard), wrap_(std::move(wrap)) {}

  absl::StatusOr<LinkSpeed> MeasureLink(uint32_t num_nodes, TimePoint deadline,
                                        const std::stop_token& stop) override {
    return shard_.MeasureLink(num_nodes, deadline, stop);
  }
  absl::StatusOr<std::unique_ptr<Member>> Join(const JoinRequest& request,
                                               std::shared_ptr<MemberEvents> events,
                                               TimePoint deadline) override {
    auto member = shard_.Join(request, std::move(events), deadline);
    if (!member.ok()) return member;
    return wrap_(*std::move(member));
  }

 private:
  Shard& shard_;
  const Wrap wrap_;
};

}  // namespace thalweg
