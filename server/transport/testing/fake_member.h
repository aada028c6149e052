// FakeMember is a test double for this room: it answers as its RecordingShard says, and records.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "core/exchange/served_shard.h"
#include "server/transport/testing/recorder.h"

namespace thalweg {

// FakeAnswers are what a RecordingShard and its members answer and record.
struct FakeAnswers {
  struct ResidualCall {
    uint32_t node;
    BucketId bucket;
    uint32_t chunk;
    std::vector<float> values;
  };

  Choice<absl::StatusOr<Terms>> join_answer{Terms{5, 1 << 18, 64, 3}};
  Choice<absl::Status> register_answer{absl::OkStatus()};
  Choice<absl::Status> contribute_answer{absl::OkStatus()};
  Choice<absl::StatusOr<std::vector<float>>> residual_answer{std::vector<float>()};
  uint32_t window_chunks = 1024;
  std::function<void()> on_register;

  Recorder<std::pair<JoinRequest, TimePoint>> joins;
  Recorder<BucketAnnouncement> buckets;
  Recorder<Group> groups;
  Recorder<Contribution> contributions;
  Recorder<RoundResult> supplied;
  Recorder<ResidualCall> residual_reads, residual_writes;
  Recorder<std::pair<uint64_t, UpdateStep>> settings;
  // The chunk, the slice, and what is written.
  Recorder<std::tuple<uint32_t, uint32_t, WeightsSlice>> weights;
  Recorder<SnapshotCall> snapshot_calls;
  SnapshotReport snapshot_answer;
  std::function<void()> on_snapshots;
  Recorder<uint32_t> heartbeats;                         // by node number
  Recorder<std::pair<uint32_t, absl::Status>> leaves;    // by node number; once for each member
  Recorder<std::pair<uint32_t, absl::Status>> given_up;  // Joins, by node number
  // These are the nodes of all Joins. They are declared last, because members that are released
  // here may still leave.
  Recorder<std::shared_ptr<ServedNode>> nodes;
};

// A FakeMember answers each contribution at once with a result of the same bytes.
class FakeMember : public Member {
 public:
  FakeMember(FakeAnswers& shard, uint32_t number, std::weak_ptr<ServedNode> node)
      : shard_(shard), terms_(*shard.join_answer.Get()), number_(number), node_(std::move(node)) {}
  ~FakeMember() override { Leave(absl::OkStatus()); }

  const Terms& terms() const override { return terms_; }
  absl::Status Register(const BucketAnnouncement& bucket, TimePoint /*deadline*/) override {
    if (left_) return HasLeft();
    shard_.buckets.Add(bucket);
    if (shard_.on_register != nullptr) shard_.on_register();
    return shard_.register_answer.Get();
  }
  absl::Status MakeGroup(const Group& group, TimePoint /*deadline*/) override {
    if (left_) return HasLeft();
    shard_.groups.Add(group);
    return absl::OkStatus();
  }
  absl::Status Contribute(Contribution contribution) override {
    const std::shared_ptr<ServedNode> node = node_.lock();
    if (left_ || node == nullptr) return HasLeft();
    if (const absl::Status refusal = shard_.contribute_answer.Get(); !refusal.ok()) return refusal;
    shard_.contributions.Add(contribution);
    if (node->Backlog() >= shard_.window_chunks) {
      return absl::FailedPreconditionError("node has more chunks on the way than its window");
    }
    node->OnResult({contribution.id, contribution.epoch, contribution.wire, contribution.elems, 8,
                    2, std::move(contribution.payload)});
    return absl::OkStatus();
  }
  absl::Status Supply(RoundResult result) override {
    if (left_) return HasLeft();
    shard_.supplied.Add(std::move(result));
    return absl::OkStatus();
  }
  absl::StatusOr<std::vector<float>> ReadResidual(BucketId bucket, uint32_t chunk,
                                                  TimePoint /*deadline*/) override {
    if (left_) return HasLeft();
    shard_.residual_reads.Add({number_, bucket, chunk, {}});
    return shard_.residual_answer.Get();
  }
  absl::Status WriteResidual(BucketId bucket, uint32_t chunk, std::span<const float> values,
                             TimePoint /*deadline*/) override {
    if (left_) return HasLeft();
    shard_.residual_writes.Add({number_, bucket, chunk, {values.begin(), values.end()}});
    return shard_.residual_answer.Get().status();
  }
  absl::Status SetSettings(uint64_t number, const UpdateStep& step,
                           TimePoint /*deadline*/) override {
    if (left_) return HasLeft();
    shard_.settings.Add({number, step});
    return shard_.register_answer.Get();
  }
  // Returns what was written last.
  absl::StatusOr<WeightsSlice> ReadWeights(BucketId /*bucket*/, uint32_t /*chunk*/,
                                           uint32_t /*slice*/, TimePoint /*deadline*/) override {
    if (left_) return HasLeft();
    if (!shard_.residual_answer.Get().ok()) return shard_.residual_answer.Get().status();
    return std::get<2>(shard_.weights.WaitFor(1).back());
  }
  absl::Status WriteWeights(BucketId /*bucket*/, uint32_t chunk, uint32_t slice,
                            WeightsSlice weights, TimePoint /*deadline*/) override {
    if (left_) return HasLeft();
    shard_.weights.Add({chunk, slice, std::move(weights)});
    return shard_.residual_answer.Get().status();
  }
  absl::StatusOr<SnapshotReport> Snapshots(const SnapshotCall& call,
                                           TimePoint /*deadline*/) override {
    if (left_) return HasLeft();
    shard_.snapshot_calls.Add(call);
    if (shard_.on_snapshots) shard_.on_snapshots();
    if (!shard_.residual_answer.Get().ok()) return shard_.residual_answer.Get().status();
    return shard_.snapshot_answer;
  }
  absl::StatusOr<Pulse> Heartbeat(TimePoint /*deadline*/) override {
    if (left_) return HasLeft();
    shard_.heartbeats.Add(number_);
    return Pulse{{"a boot", -5}, {{"node 7 (far)", "its cable"}}};
  }
  void Leave(const absl::Status& reason) override {
    if (!left_.exchange(true)) shard_.leaves.Add({number_, reason});
  }

 private:
  static absl::Status HasLeft() { return absl::FailedPreconditionError("the node has left"); }

  FakeAnswers& shard_;
  const Terms terms_;
  const uint32_t number_;
  const std::weak_ptr<ServedNode> node_;  // it owns the member
  std::atomic<bool> left_{false};
};

}  // namespace thalweg
