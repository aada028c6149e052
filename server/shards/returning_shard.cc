#include "server/shards/returning_shard.h"

#include <span>
#include <utility>

#include "core/base/status_macros.h"

namespace thalweg {
namespace {

absl::Status StatusOf(const absl::Status& status) { return status; }
template <typename T>
absl::Status StatusOf(const absl::StatusOr<T>& result) {
  return result.status();
}

// A ReturningMember makes a node's calls to whatever member its seat has.
class ReturningMember : public Member {
 public:
  explicit ReturningMember(std::shared_ptr<ReturningSeat> seat) : seat_(std::move(seat)) {}
  ~ReturningMember() override { Leave(absl::OkStatus()); }

  const Terms& terms() const override { return seat_->terms(); }

  absl::Status Register(const BucketAnnouncement& bucket, TimePoint deadline) override {
    seat_->NoteBucket(bucket);
    return CallAgain(deadline, [&](Member& member) { return member.Register(bucket, deadline); });
  }
  absl::Status MakeGroup(const Group& group, TimePoint deadline) override {
    seat_->NoteGroup(group);
    return CallAgain(deadline, [&](Member& member) { return member.MakeGroup(group, deadline); });
  }
  absl::Status Contribute(Contribution contribution) override {
    absl::StatusOr<std::shared_ptr<Member>> member = seat_->NoteContribution(contribution);
    THALWEG_RETURN_IF_ERROR(member.status());
    if (*member == nullptr) return absl::OkStatus();  // it will be sent when the node has returned
    const absl::Status sent = (*member)->Contribute(std::move(contribution));
    // A membership that has ended meanwhile says nothing about the next one, which gets it again.
    return absl::IsNotFound(sent) || seat_->Present() != *member ? absl::OkStatus() : sent;
  }
  absl::Status Supply(RoundResult /*result*/) override {
    return absl::FailedPreconditionError("nobody wants a result of this node's caller");
  }
  absl::StatusOr<std::vector<float>> ReadResidual(BucketId bucket, uint32_t chunk,
                                                  TimePoint deadline) override {
    return CallAgain(deadline,
                     [&](Member& member) { return member.ReadResidual(bucket, chunk, deadline); });
  }
  absl::Status WriteResidual(BucketId bucket, uint32_t chunk, std::span<const float> values,
                             TimePoint deadline) override {
    return CallAgain(deadline, [&](Member& member) {
      return member.WriteResidual(bucket, chunk, values, deadline);
    });
  }
  absl::Status SetSettings(uint64_t number, const UpdateStep& step, TimePoint deadline) override {
    return CallAgain(deadline,
                     [&](Member& member) { return member.SetSettings(number, step, deadline); });
  }
  absl::StatusOr<WeightsSlice> ReadWeights(BucketId bucket, uint32_t chunk, uint32_t slice,
                                           TimePoint deadline) override {
    return CallAgain(deadline, [&](Member& member) {
      return member.ReadWeights(bucket, chunk, slice, deadline);
    });
  }
  absl::Status WriteWeights(BucketId bucket, uint32_t chunk, uint32_t slice, WeightsSlice weights,
                            TimePoint deadline) override {
    return CallAgain(deadline, [&](Member& member) {
      return member.WriteWeights(bucket, chunk, slice, weights, deadline);
    });
  }
  absl::StatusOr<SnapshotReport> Snapshots(const SnapshotCall& call, TimePoint deadline) override {
    return CallAgain(deadline, [&](Member& member) { return member.Snapshots(call, deadline); });
  }
  absl::StatusOr<Pulse> Heartbeat(TimePoint deadline) override {
    const absl::Status away = absl::UnavailableError("the shard has been restarted");
    const std::shared_ptr<Member> member = seat_->Present();
    if (member == nullptr) return away;
    absl::StatusOr<Pulse> pulse = member->Heartbeat(deadline);
    // The events will say so, too.
    if (absl::IsNotFound(pulse.status())) return away;
    return pulse;
  }
  void Leave(const absl::Status& reason) override { seat_->Leave(reason); }

 private:
  // Returns what `call` returns; repeats it when the membership ended, because the shard was
  // restarted.
  template <typename Call>
  auto CallAgain(TimePoint deadline, const Call& call) -> decltype(call(std::declval<Member&>())) {
    uint64_t after = 0;
    while (true) {
      THALWEG_ASSIGN_OR_RETURN(const ReturningSeat::Place place, seat_->Await(after, deadline));
      auto result = call(*place.member);
      const absl::Status status = StatusOf(result);
      const bool has_ended = absl::IsNotFound(status) || seat_->Present() != place.member;
      if (status.ok() || !has_ended) return result;
      after = place.incarnation;
    }
  }

  const std::shared_ptr<ReturningSeat> seat_;
};

}  // namespace

ReturningShard::ReturningShard(std::shared_ptr<Shard> shard, Duration patience,
                               MetricRegistry& metrics)
    : shard_(std::move(shard)),
      patience_(patience),
      metrics_{metrics.GetCounter("thalweg_sidecar_shard_returns_total",
                                  "Times that a job has gone on at a shard that was restarted"),
               metrics.GetGauge("thalweg_sidecar_kept_result_bytes",
                                "Results that are kept for shards that may be restarted")} {}

absl::StatusOr<std::unique_ptr<Member>> ReturningShard::Join(const JoinRequest& request,
                                                             std::shared_ptr<MemberEvents> events,
                                                             TimePoint deadline) {
  const auto seat = std::make_shared<ReturningSeat>(*shard_, patience_, metrics_);
  THALWEG_RETURN_IF_ERROR(seat->Join(request, std::move(events), deadline));
  return Occupy(seat);
}

absl::StatusOr<std::unique_ptr<Member>> ReturningShard::TakeUp(
    const JoinRequest& request, const KeptSeat& kept, const std::shared_ptr<MemberEvents>& events,
    TimePoint deadline) {
  const auto seat = std::make_shared<ReturningSeat>(*shard_, patience_, metrics_);
  RoundLedger ledger;
  for (const BucketAnnouncement& bucket : kept.buckets) ledger.NoteBucket(bucket);
  for (const RoundResult& result : kept.results) ledger.NoteLast(result);
  const absl::Status taken =
      seat->TakeUp(request, kept.agreed, std::move(ledger), events, deadline);
  if (taken.ok()) return Occupy(seat);
  seat->Leave(taken);
  return taken;
}

std::unique_ptr<Member> ReturningShard::Occupy(const std::shared_ptr<ReturningSeat>& seat) {
  MutexLock lock(mutex_);
  threads_.emplace_back("shard-return", [seat] { seat->ReturnLoop(); });
  return std::make_unique<ReturningMember>(seat);
}

}  // namespace thalweg
