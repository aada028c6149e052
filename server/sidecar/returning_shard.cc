#include "server/sidecar/returning_shard.h"

#include <spdlog/spdlog.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"

namespace thalweg {
namespace {

// A shard that is found restarting or shutting down is asked again after this time.
constexpr Duration kPause = std::chrono::milliseconds(100);

absl::Status StatusOf(const absl::Status& status) { return status; }
template <typename T>
absl::Status StatusOf(const absl::StatusOr<T>& result) {
  return result.status();
}

absl::Status CheckSameTerms(const Membership& now, const Membership& before) {
  if (!now.resumed) {
    return absl::FailedPreconditionError("its release cannot resume jobs: install this node's");
  }
  if (now.epoch == before.epoch && now.chunk_bytes == before.chunk_bytes &&
      now.window_chunks == before.window_chunks) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(
      absl::StrCat("it offers epoch ", now.epoch, ", chunks of ", now.chunk_bytes,
                   " bytes and a window of ", now.window_chunks, ", before it was ", before.epoch,
                   ", ", before.chunk_bytes, " and ", before.window_chunks));
}

}  // namespace

// An Ear hears what the shard says to one of the memberships.
class ReturningShard::Ear : public NodeSink {
 public:
  Ear(std::shared_ptr<State> state, uint64_t incarnation)
      : state_(std::move(state)), incarnation_(incarnation) {}

  void OnResult(RoundResult result) override {
    std::shared_ptr<NodeSink> sink;
    {
      RoundLedger::Replaced replaced;  // released outside the lock, and before the sink is called
      MutexLock lock(state_->mutex);
      if (incarnation_ != state_->incarnation || state_->sink == nullptr) return;
      const uint64_t before = state_->ledger.result_bytes();
      if (!state_->ledger.NoteResult(result, &replaced)) return;
      state_->kept_bytes.Add(static_cast<double>(state_->ledger.result_bytes()) -
                             static_cast<double>(before));
      sink = state_->sink;
    }
    sink->OnResult(std::move(result));
  }

  void OnFailed(absl::Status why) override {
    std::shared_ptr<NodeSink> sink;
    {
      MutexLock lock(state_->mutex);
      if (incarnation_ != state_->incarnation || state_->sink == nullptr) return;
      state_->lost = why;
      state_->changed.NotifyAll();
      // While the node returns, its thread decides what that means.
      const bool is_final = state_->is_up && !absl::IsNotFound(why);
      state_->is_up = false;
      if (!is_final) return;
      state_->end = why;
      sink.swap(state_->sink);
    }
    sink->OnFailed(std::move(why));
  }

 private:
  const std::shared_ptr<State> state_;
  const uint64_t incarnation_;
};

ReturningShard::ReturningShard(std::shared_ptr<Shard> shard, Duration patience,
                               MetricRegistry& metrics)
    : shard_(std::move(shard)),
      patience_(patience),
      returns_(metrics.GetCounter("thalweg_sidecar_shard_returns_total",
                                  "Times that a job has gone on at a shard that was restarted")),
      state_(std::make_shared<State>(
          metrics.GetGauge("thalweg_sidecar_kept_result_bytes",
                           "Results that are kept for shards that may be restarted"))) {}

ReturningShard::~ReturningShard() {
  Leave(agreed_.token, absl::CancelledError("the node is shutting down"));
  thread_.Join();
}

absl::StatusOr<Membership> ReturningShard::Join(const JoinRequest& request, TimePoint deadline) {
  absl::StatusOr<Membership> membership = shard_->Join(request, deadline);
  if (!membership.ok()) return membership;
  agreed_ = *membership;
  request_ = request;
  request_.chunk_bytes = agreed_.chunk_bytes;
  request_.window_chunks = agreed_.window_chunks;
  MutexLock lock(state_->mutex);
  state_->token = agreed_.token;
  return membership;
}

absl::Status ReturningShard::Attach(SessionToken token, const std::string& identity,
                                    std::shared_ptr<NodeSink> sink) {
  {
    MutexLock lock(state_->mutex);
    state_->sink = std::move(sink);
    state_->incarnation = 1;
    state_->is_up = true;
  }
  THALWEG_RETURN_IF_ERROR(shard_->Attach(token, identity, std::make_shared<Ear>(state_, 1)));
  thread_ = Thread("shard-return", [this] { ReturnLoop(); });
  return absl::OkStatus();
}

absl::StatusOr<ReturningShard::Seat> ReturningShard::AwaitSeat(uint64_t after, TimePoint deadline) {
  State& state = *state_;
  MutexLock lock(state.mutex);
  const bool done = state.changed.WaitUntil(
      state.mutex, deadline, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(state.mutex) {
        return !state.end.ok() || (state.is_up && state.incarnation > after);
      });
  if (!state.end.ok()) return state.end;
  if (done) return Seat{state.token, state.incarnation};
  return absl::UnavailableError(
      absl::StrCat("aggregator shard ", request_.shard,
                   " has been restarted, and the job has not come together there again"));
}

template <typename Call>
auto ReturningShard::CallAgain(TimePoint deadline, const Call& call)
    -> decltype(call(SessionToken{})) {
  uint64_t after = 0;
  while (true) {
    THALWEG_ASSIGN_OR_RETURN(const Seat seat, AwaitSeat(after, deadline));
    auto result = call(seat.token);
    if (!absl::IsNotFound(StatusOf(result))) return result;
    after = seat.incarnation;
  }
}

absl::Status ReturningShard::RegisterBucket(SessionToken /*token*/,
                                            const BucketAnnouncement& bucket, TimePoint deadline) {
  {
    MutexLock lock(state_->mutex);
    state_->ledger.NoteBucket(bucket);
  }
  return CallAgain(deadline, [&](SessionToken token) {
    return shard_->RegisterBucket(token, bucket, deadline);
  });
}

absl::Status ReturningShard::Contribute(SessionToken /*token*/, Contribution contribution) {
  SessionToken token = 0;
  {
    MutexLock lock(state_->mutex);
    if (!state_->end.ok()) return state_->end;
    state_->ledger.NoteContribution(contribution);
    if (!state_->is_up) return absl::OkStatus();  // PutBack will send it
    token = state_->token;
  }
  const absl::Status sent = shard_->Contribute(token, std::move(contribution));
  return absl::IsNotFound(sent) ? absl::OkStatus() : sent;
}

absl::Status ReturningShard::Supply(SessionToken /*token*/, RoundResult /*result*/) {
  return absl::FailedPreconditionError("nobody wants a result of this node's caller");
}

absl::StatusOr<std::vector<float>> ReturningShard::ReadResidual(SessionToken /*token*/,
                                                                BucketId bucket, uint32_t chunk,
                                                                TimePoint deadline) {
  return CallAgain(deadline, [&](SessionToken token) {
    return shard_->ReadResidual(token, bucket, chunk, deadline);
  });
}

absl::Status ReturningShard::WriteResidual(SessionToken /*token*/, BucketId bucket, uint32_t chunk,
                                           std::span<const float> values, TimePoint deadline) {
  return CallAgain(deadline, [&](SessionToken token) {
    return shard_->WriteResidual(token, bucket, chunk, values, deadline);
  });
}

absl::StatusOr<ClockReading> ReturningShard::Heartbeat(SessionToken /*token*/, TimePoint deadline) {
  SessionToken token = 0;
  {
    MutexLock lock(state_->mutex);
    if (state_->is_up) token = state_->token;
  }
  const absl::Status away = absl::UnavailableError("the shard has been restarted");
  if (token == 0) return away;
  absl::StatusOr<ClockReading> reading = shard_->Heartbeat(token, deadline);
  // The streams will say so, too.
  if (absl::IsNotFound(reading.status())) return away;
  return reading;
}

void ReturningShard::Leave(SessionToken /*token*/, const absl::Status& reason) {
  std::shared_ptr<NodeSink> sink;  // this and the next are released outside the lock
  RoundLedger ledger;
  SessionToken token = 0;
  {
    MutexLock lock(state_->mutex);
    sink.swap(state_->sink);
    std::swap(ledger, state_->ledger);
    state_->kept_bytes.Add(-static_cast<double>(ledger.result_bytes()));
    if (state_->end.ok()) {
      state_->end = reason.ok() ? absl::CancelledError("the node has left") : reason;
    }
    state_->is_up = false;
    token = std::exchange(state_->token, 0);
    state_->changed.NotifyAll();
  }
  if (token != 0) shard_->Leave(token, reason);
}

void ReturningShard::ReturnLoop() {
  while (true) {
    {
      State& state = *state_;
      MutexLock lock(state.mutex);
      state.changed.WaitUntil(state.mutex, kUntilStopped,
                              [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(state.mutex) {
                                return !state.end.ok() || !state.lost.ok();
                              });
      if (!state.end.ok()) return;
    }
    const absl::Status status = Return();
    if (!status.ok()) return Fail(status);
  }
}

absl::Status ReturningShard::Return() {
  const TimePoint begin = Now();
  const TimePoint deadline = begin + patience_;
  spdlog::warn(
      "job '{}': aggregator shard {} has forgotten the job, so it has been restarted: "
      "joining it again",
      request_.job, request_.shard);
  while (true) {
    const absl::Status status = TryToReturn(deadline);
    if (status.ok()) {
      returns_.Add(1);
      spdlog::info(
          "job '{}': aggregator shard {} goes on {:.1f} s after this node found that it "
          "had been restarted",
          request_.job, request_.shard, ToSeconds(Now() - begin));
      return status;
    }
    const bool may_change = absl::IsNotFound(status) || absl::IsUnavailable(status);
    State& state = *state_;
    MutexLock lock(state.mutex);
    const bool has_ended = state.changed.WaitUntil(
        state.mutex, Now() + kPause, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(state.mutex) {
          return !may_change || !state.end.ok();
        });
    if (has_ended || Now() >= deadline) return status;
  }
}

absl::Status ReturningShard::TryToReturn(TimePoint deadline) {
  JoinRequest request = request_;
  SessionToken old = 0;
  Seat seat;
  {
    MutexLock lock(state_->mutex);
    if (!state_->end.ok()) return state_->end;
    seat.incarnation = ++state_->incarnation;
    state_->lost = absl::OkStatus();
    old = std::exchange(state_->token, 0);
    request.resume = state_->ledger.Completed();
  }
  if (old != 0) shard_->Leave(old, absl::OkStatus());  // ends its streams
  THALWEG_ASSIGN_OR_RETURN(const Membership membership, shard_->Join(request, deadline));
  seat.token = membership.token;
  const absl::Status status = CheckSameTerms(membership, agreed_);
  absl::Status end;
  {
    MutexLock lock(state_->mutex);
    end = state_->end.ok() ? status : state_->end;
    if (end.ok()) state_->token = seat.token;
  }
  if (!end.ok()) {
    shard_->Leave(seat.token, end);
    return end;
  }
  THALWEG_RETURN_IF_ERROR(shard_->Attach(seat.token, request_.identity,
                                         std::make_shared<Ear>(state_, seat.incarnation)));
  return PutBack(seat, membership.wanted, deadline);
}

absl::Status ReturningShard::PutBack(const Seat& seat, const std::vector<BucketRounds>& wanted,
                                     TimePoint deadline) {
  std::vector<BucketAnnouncement> buckets;
  absl::StatusOr<std::vector<RoundResult>> results;
  {
    MutexLock lock(state_->mutex);
    buckets = state_->ledger.Buckets();
    results = state_->ledger.Results(wanted);
  }
  THALWEG_RETURN_IF_ERROR(results.status());
  for (const BucketAnnouncement& bucket : buckets) {
    THALWEG_RETURN_IF_ERROR(shard_->RegisterBucket(seat.token, bucket, deadline));
  }
  for (RoundResult& result : *results) {
    THALWEG_RETURN_IF_ERROR(shard_->Supply(seat.token, std::move(result)));
  }
  std::vector<Contribution> unanswered;
  {
    MutexLock lock(state_->mutex);
    if (!state_->end.ok()) return state_->end;
    if (!state_->lost.ok()) return state_->lost;
    state_->is_up = true;
    state_->changed.NotifyAll();
    unanswered = state_->ledger.Unanswered();
  }
  for (Contribution& contribution : unanswered) {
    // A stream that ends here is told to the Ear.
    shard_->Contribute(seat.token, std::move(contribution)).IgnoreError();
  }
  return absl::OkStatus();
}

void ReturningShard::Fail(const absl::Status& why) {
  const absl::Status failure(absl::IsNotFound(why) ? absl::StatusCode::kUnavailable : why.code(),
                             absl::StrCat(why.message(), "; aggregator shard ", request_.shard,
                                          " has been restarted, and the job cannot go on there"));
  std::shared_ptr<NodeSink> sink;
  {
    MutexLock lock(state_->mutex);
    if (!state_->end.ok()) return;
    state_->end = failure;
    sink.swap(state_->sink);
    state_->changed.NotifyAll();
  }
  sink->OnFailed(failure);
}

}  // namespace thalweg
