#include "server/shards/returning_seat.h"

#include <spdlog/spdlog.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "core/exchange/of_job.h"

namespace thalweg {
namespace {

// A shard that is found restarting or shutting down is asked again after this time.
constexpr Duration kPause = std::chrono::milliseconds(100);

absl::Status CheckSameTerms(const Terms& now, const Terms& before) {
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

// A Listener hears what the shard says to one of the memberships.
class ReturningSeat::Listener : public MemberEvents {
 public:
  Listener(std::shared_ptr<ReturningSeat> seat, uint64_t incarnation)
      : seat_(std::move(seat)), incarnation_(incarnation) {}

  void OnResult(RoundResult result) override { seat_->OnResult(incarnation_, std::move(result)); }
  void OnFailed(absl::Status why) override { seat_->OnFailed(incarnation_, std::move(why)); }

 private:
  const std::shared_ptr<ReturningSeat> seat_;
  const uint64_t incarnation_;
};

absl::Status ReturningSeat::Join(const JoinRequest& request, std::shared_ptr<MemberEvents> events,
                                 TimePoint deadline) {
  {
    MutexLock lock(mutex_);
    events_ = std::move(events);
    incarnation_ = 1;
    is_up_ = true;
  }
  THALWEG_ASSIGN_OR_RETURN(
      std::shared_ptr<Member> member,
      shard_.Join(request, std::make_shared<Listener>(shared_from_this(), 1), deadline));
  agreed_ = member->terms();
  request_ = request;
  request_.chunk_bytes = agreed_.chunk_bytes;
  request_.window_chunks = agreed_.window_chunks;
  MutexLock lock(mutex_);
  member_ = std::move(member);
  return absl::OkStatus();
}

absl::Status ReturningSeat::TakeUp(const JoinRequest& request, const Terms& agreed,
                                   RoundLedger ledger, std::shared_ptr<MemberEvents> events,
                                   TimePoint deadline) {
  agreed_ = agreed;
  request_ = request;
  request_.chunk_bytes = agreed_.chunk_bytes;
  request_.window_chunks = agreed_.window_chunks;
  {
    MutexLock lock(mutex_);
    events_ = std::move(events);
    ledger_ = std::move(ledger);
    metrics_.kept_bytes.Add(static_cast<double>(ledger_.result_bytes()));
  }
  return KeepTrying(deadline);
}

void ReturningSeat::OnResult(uint64_t incarnation, RoundResult result) {
  std::shared_ptr<MemberEvents> events;
  {
    RoundLedger::Replaced replaced;  // released outside the lock, and before the node is told
    MutexLock lock(mutex_);
    if (incarnation != incarnation_ || events_ == nullptr) return;
    const uint64_t before = ledger_.result_bytes();
    if (!ledger_.NoteResult(result, &replaced)) return;
    metrics_.kept_bytes.Add(static_cast<double>(ledger_.result_bytes()) -
                            static_cast<double>(before));
    events = events_;
  }
  events->OnResult(std::move(result));
}

void ReturningSeat::OnFailed(uint64_t incarnation, absl::Status why) {
  std::shared_ptr<MemberEvents> events;
  {
    MutexLock lock(mutex_);
    if (incarnation != incarnation_ || events_ == nullptr) return;
    lost_ = why;
    changed_.NotifyAll();
    // While the node returns, its thread decides what that means.
    const bool is_final = is_up_ && !absl::IsNotFound(why);
    is_up_ = false;
    if (!is_final) return;
    // What the shard says of the job names it; otherwise the shard itself is away for good.
    const bool is_away = keeps_weights_ && absl::IsUnavailable(why) && !IsOfJob(request_.job, why);
    if (is_away) why = GoneLocked(why);
    end_ = why;
    events.swap(events_);
  }
  events->OnFailed(std::move(why));
}

absl::StatusOr<ReturningSeat::Place> ReturningSeat::Await(uint64_t after, TimePoint deadline) {
  MutexLock lock(mutex_);
  const bool done =
      changed_.WaitUntil(mutex_, deadline, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return !end_.ok() || (is_up_ && incarnation_ > after);
      });
  if (!end_.ok()) return end_;
  if (done) return Place{member_, incarnation_};
  return absl::UnavailableError(
      absl::StrCat("aggregator shard ", request_.shard,
                   " has been restarted, and the job has not come together there again"));
}

std::shared_ptr<Member> ReturningSeat::Present() {
  MutexLock lock(mutex_);
  return is_up_ ? member_ : nullptr;
}

void ReturningSeat::NoteBucket(const BucketAnnouncement& bucket) {
  MutexLock lock(mutex_);
  keeps_weights_ = keeps_weights_ || bucket.update.has_value();
  ledger_.NoteBucket(bucket);
}

void ReturningSeat::NoteGroup(const Group& group) {
  MutexLock lock(mutex_);
  ledger_.NoteGroup(group);
}

absl::StatusOr<std::shared_ptr<Member>> ReturningSeat::NoteContribution(
    const Contribution& contribution) {
  MutexLock lock(mutex_);
  if (!end_.ok()) return end_;
  ledger_.NoteContribution(contribution);
  return is_up_ ? member_ : nullptr;  // PutBack will send it
}

void ReturningSeat::Leave(const absl::Status& reason) {
  std::shared_ptr<MemberEvents> events;  // this and the next two are released outside the lock
  RoundLedger ledger;
  std::shared_ptr<Member> member;
  {
    MutexLock lock(mutex_);
    events.swap(events_);
    std::swap(ledger, ledger_);
    metrics_.kept_bytes.Add(-static_cast<double>(ledger.result_bytes()));
    if (end_.ok()) end_ = reason.ok() ? absl::CancelledError("the node has left") : reason;
    is_up_ = false;
    member.swap(member_);
    changed_.NotifyAll();
  }
  if (member != nullptr) member->Leave(reason);
}

void ReturningSeat::ReturnLoop() {
  while (true) {
    {
      MutexLock lock(mutex_);
      changed_.WaitUntil(mutex_, kUntilStopped, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return !end_.ok() || !lost_.ok();
      });
      if (!end_.ok()) return;
    }
    const absl::Status status = Return();
    if (!status.ok()) return Fail(status);
  }
}

absl::Status ReturningSeat::Return() {
  const TimePoint begin = Now();
  spdlog::warn(
      "job '{}': aggregator shard {} has forgotten the job, so it or a node has been restarted: "
      "joining it again",
      request_.job, request_.shard);
  const absl::Status status = KeepTrying(begin + patience_);
  if (!status.ok()) return status;
  metrics_.returns.Add(1);
  spdlog::info("job '{}': aggregator shard {} goes on {:.1f} s after it had forgotten the job",
               request_.job, request_.shard, ToSeconds(Now() - begin));
  return status;
}

absl::Status ReturningSeat::KeepTrying(TimePoint deadline) {
  while (true) {
    const absl::Status status = TryToReturn(deadline);
    if (status.ok()) return status;
    const bool may_change = absl::IsNotFound(status) || absl::IsUnavailable(status);
    MutexLock lock(mutex_);
    const bool has_ended = changed_.WaitUntil(
        mutex_, Now() + kPause,
        [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !may_change || !end_.ok(); });
    if (has_ended || Now() >= deadline) return status;
  }
}

absl::Status ReturningSeat::TryToReturn(TimePoint deadline) {
  JoinRequest request = request_;
  std::shared_ptr<Member> old;
  uint64_t incarnation = 0;
  {
    MutexLock lock(mutex_);
    if (!end_.ok()) return end_;
    incarnation = ++incarnation_;
    lost_ = absl::OkStatus();
    old.swap(member_);
    if (const size_t lost = ledger_.num_open_one_shots(); lost > 0) {
      return absl::AbortedError(absl::StrCat(
          lost, " one-shot rounds of collectives were open, which no shard can take up again"));
    }
    if (ledger_.has_letters()) {
      return absl::AbortedError(
          "workers have sent to each other through it, and some of that may be lost");
    }
    request.resume = ledger_.Completed();
  }
  if (old != nullptr) old->Leave(absl::OkStatus());  // ends its streams
  THALWEG_ASSIGN_OR_RETURN(
      const std::shared_ptr<Member> member,
      shard_.Join(request, std::make_shared<Listener>(shared_from_this(), incarnation), deadline));
  const absl::Status status = CheckSameTerms(member->terms(), agreed_);
  absl::Status end;
  {
    MutexLock lock(mutex_);
    end = end_.ok() ? status : end_;
    if (end.ok()) member_ = member;
  }
  if (end.ok()) return PutBack(*member, deadline);
  member->Leave(end);
  return end;
}

absl::Status ReturningSeat::PutBack(Member& member, TimePoint deadline) {
  std::vector<BucketAnnouncement> buckets;
  std::vector<Group> groups;
  absl::StatusOr<std::vector<RoundResult>> results;
  {
    MutexLock lock(mutex_);
    buckets = ledger_.Buckets();
    groups = ledger_.groups();
    results = ledger_.Results(member.terms().wanted);
  }
  THALWEG_RETURN_IF_ERROR(results.status());
  for (const Group& group : groups) {
    THALWEG_RETURN_IF_ERROR(member.MakeGroup(group, deadline));
  }
  for (const BucketAnnouncement& bucket : buckets) {
    THALWEG_RETURN_IF_ERROR(member.Register(bucket, deadline));
  }
  for (RoundResult& result : *results) {
    THALWEG_RETURN_IF_ERROR(member.Supply(std::move(result)));
  }
  std::vector<Contribution> unanswered;
  {
    MutexLock lock(mutex_);
    if (!end_.ok()) return end_;
    if (!lost_.ok()) return lost_;
    is_up_ = true;
    changed_.NotifyAll();
    unanswered = ledger_.Unanswered();
  }
  for (Contribution& contribution : unanswered) {
    // A stream that ends here is told to the Listener.
    member.Contribute(std::move(contribution)).IgnoreError();
  }
  return absl::OkStatus();
}

absl::Status ReturningSeat::GoneLocked(const absl::Status& why) const {
  return keeps_weights_ ? absl::DataLossError(why.message()) : why;
}

void ReturningSeat::Fail(const absl::Status& why) {
  absl::Status failure(absl::IsNotFound(why) ? absl::StatusCode::kUnavailable : why.code(),
                       absl::StrCat(why.message(), "; aggregator shard ", request_.shard,
                                    " has been restarted, and the job cannot go on there"));
  std::shared_ptr<MemberEvents> events;
  {
    MutexLock lock(mutex_);
    if (!end_.ok()) return;
    failure = GoneLocked(failure);
    end_ = failure;
    events.swap(events_);
    changed_.NotifyAll();
  }
  events->OnFailed(failure);
}

}  // namespace thalweg
