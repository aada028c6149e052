#include "server/aggregator/job.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/protocol.h"
#include "core/base/status_macros.h"
#include "core/exchange/of_job.h"
#include "server/base/printable.h"
#include "server/round/same_job.h"

namespace thalweg {
namespace {

JoinRequest WithoutRounds(JoinRequest request) {
  if (request.resume) request.resume.emplace();
  return request;
}

}  // namespace

Job::Job(const JoinRequest& first, uint32_t max_window_chunks, MemoryBudget& memory,
         ShardMetrics& metrics, FaultLog& faults, TraceWriter* trace, SnapshotWriter* snapshots)
    : spec_(WithoutRounds(first)),
      metrics_(metrics),
      faults_(faults),
      delivery_(spec_, metrics, trace, *this),
      snapshots_(snapshots),
      held_(snapshots == nullptr ? nullptr : snapshots->Hold(spec_.identity)),
      members_(first),
      sinks_(first.num_nodes),
      plan_(spec_, max_window_chunks),
      rounds_(spec_, members_, snapshots != nullptr),
      letters_(first.num_nodes),
      memory_(first, {plan_, rounds_, letters_}, memory, metrics),
      tally_(first.num_nodes, metrics) {}

absl::Status Job::AddMember(const JoinRequest& request, std::shared_ptr<ServedNode> node,
                            TimePoint now, std::shared_ptr<TenantAccount> account) {
  absl::Status refusal;
  bool fatal = false;
  {
    MutexLock lock(mutex_);
    if (!failure_.ok()) {
      // A node that has been restarted is not to try again until all others have left.
      const bool is_over = request.resume && !WhyOverLocked().ok();
      return is_over ? absl::AbortedError(failure_.message()) : failure_;
    }
    refusal = CheckSameJob(spec_, request);
    fatal = !refusal.ok() && !members_.IsComplete();
    if (refusal.ok()) refusal = members_.CheckSeat(request);
    if (refusal.ok()) {
      refusal = members_.CheckWorkers(request);
      if (refusal.ok() && request.resume)
        refusal = rounds_.AddCompleted(request.node, *request.resume);
      if (refusal.ok()) {
        memory_.ChargeTo(std::move(account));
        refusal = memory_.Reserve();
      }
      fatal = !refusal.ok();
    }
    if (refusal.ok()) SeatLocked(request, std::move(node), now);
  }
  if (fatal) {
    Fail(refusal);
  } else if (!refusal.ok()) {
    faults_.AddRefusal(spec_.job, refusal, now);
  }
  return OfJob(spec_.job, refusal);
}

void Job::SeatLocked(const JoinRequest& request, std::shared_ptr<ServedNode> node, TimePoint now) {
  members_.Join(request, now);
  sinks_[request.node] = std::move(node);
  metrics_.nodes.Add(1);
  plan_.Learn(request);
  if (members_.IsComplete()) {
    const absl::Status begun = BeginLocked(now);
    if (!begun.ok()) FailLocked(begun);  // WhenComplete tells the nodes
  }
}

std::shared_ptr<const TenantAccount> Job::account() {
  MutexLock lock(mutex_);
  return memory_.account();
}

absl::Status Job::RegisterBucket(uint32_t node, const BucketAnnouncement& bucket) {
  absl::Status status;
  {
    MutexLock lock(mutex_);
    THALWEG_RETURN_IF_ERROR(CheckActiveLocked(node));
    status = rounds_.Register(node, bucket);
    if (status.ok()) status = memory_.Reserve();
    UpdateMemoryLocked();
  }
  if (!status.ok()) Fail(status);
  return OfJob(spec_.job, status);
}

absl::Status Job::MakeGroup(uint32_t node, const Group& group) {
  absl::Status status;
  {
    MutexLock lock(mutex_);
    THALWEG_RETURN_IF_ERROR(CheckActiveLocked(node));
    if (spec_.losses.min_nodes > 0) {
      status = absl::InvalidArgumentError(
          "a group of workers, whose collectives need all nodes, but the job is to go on when one "
          "is lost (THALWEG_MIN_NODES)");
    }
    if (status.ok()) status = members_.CheckGroup(group);
    if (status.ok() && group.window_chunks > plan_.max_window_chunks()) {
      status = absl::InvalidArgumentError(absl::StrCat(ToString(group), ": windows have at most ",
                                                       plan_.max_window_chunks(), " chunks"));
    }
    if (status.ok()) status = rounds_.SetGroup(group);
    if (status.ok()) status = memory_.Reserve();
    if (!status.ok()) {
      status = absl::Status(status.code(),
                            absl::StrCat(members_.Name(node), " declares ", status.message()));
    }
    UpdateMemoryLocked();
  }
  if (!status.ok()) Fail(status);
  return OfJob(spec_.job, status);
}

absl::StatusOr<std::vector<LostNode>> Job::Heartbeat(uint32_t node, TimePoint now) {
  MutexLock lock(mutex_);
  THALWEG_RETURN_IF_ERROR(HearLocked(node, now));
  return members_.Lost();
}

void Job::RemoveMember(uint32_t node, const absl::Status& reason) {
  absl::Status failure;
  std::optional<Loss> loss;
  std::vector<std::shared_ptr<ServedNode>> sinks;
  bool needs_no_snapshots = false;
  {
    MutexLock lock(mutex_);
    if (!members_.Leave(node)) return;
    sinks_[node] = nullptr;
    metrics_.nodes.Add(-1);
    if (!reason.ok()) {
      failure = members_.Blame(node, reason);
      auto lost = LoseLocked(node, failure, Now());
      if (!lost.ok()) failure = lost.status();
      if (lost.ok() && lost->has_value()) {
        loss = *std::move(lost);
        failure = absl::OkStatus();
      }
    } else {
      auto completed = rounds_.Leave(node, Now());
      failure = completed.ok() ? memory_.ReserveStates() : completed.status();
      if (completed.ok()) loss.emplace().completed = *std::move(completed);
    }
    if (members_.IsEmpty()) rounds_.DropStates();
    // This runs under the same lock, so that no other call finds the node gone and reports that as
    // the reason.
    if (!failure.ok()) sinks = FailLocked(failure);
    needs_no_snapshots = NoteEndLocked();
    UpdateMemoryLocked();
  }
  if (needs_no_snapshots) snapshots_->Forget(spec_.identity);
  if (loss) Conclude(*loss);
  Tell(sinks, OfJob(spec_.job, failure));
}

bool Job::NoteEndLocked() {
  if (!members_.IsEmpty() || !failure_.ok()) return false;
  metrics_.jobs_ended.Add(absl::StatusCode::kOk);
  return memory_.has_copies();
}

void Job::Tick(TimePoint now, TimePoint awake_since) {
  absl::Status failure;
  std::vector<Loss> losses;
  bool needs_no_snapshots = false;
  {
    MutexLock lock(mutex_);
    failure = FindFailureLocked(now, awake_since, &losses);
    if (failure.ok() && !losses.empty()) needs_no_snapshots = NoteEndLocked();
  }
  if (needs_no_snapshots) snapshots_->Forget(spec_.identity);
  for (const Loss& loss : losses) Conclude(loss);
  if (!failure.ok()) Fail(failure);
  AnswerWaiting(now);
}

absl::Status Job::FindFailureLocked(TimePoint now, TimePoint awake_since,
                                    std::vector<Loss>* losses) {
  if (!failure_.ok()) return absl::OkStatus();
  for (const Members::Finding& silent : members_.Silent(now, awake_since)) {
    THALWEG_ASSIGN_OR_RETURN(std::optional<Loss> loss, LoseLocked(silent.node, silent.why, now));
    if (!loss) return silent.why;
    losses->push_back(*std::move(loss));
  }
  THALWEG_ASSIGN_OR_RETURN(std::vector<Completed> ripe, rounds_.TakeRipe(now));
  if (!ripe.empty()) {
    THALWEG_RETURN_IF_ERROR(memory_.ReserveStates());
    losses->emplace_back().completed = std::move(ripe);
  }
  auto expired = rounds_.Expired(now);
  // What came while this process was stopped is still to be read.
  std::erase_if(expired, [&](const RoundEngine::OpenRound& round) {
    return now <= awake_since + round.timeout;
  });
  if (expired.empty()) return absl::OkStatus();
  const RoundEngine::OpenRound& round = expired.front();
  return absl::DeadlineExceededError(absl::StrCat(
      ToString(round.id), " waited ", ToSeconds(round.timeout), " s for ",
      members_.Names(round.missing), IsOneShot(round.id) ? ", or workers call different ones" : "",
      "; if that is a long but healthy pause, raise the timeout (",
      IsOneShot(round.id) ? "that of the process group" : "THALWEG_STEP_TIMEOUT", ")"));
}

void Job::Fail(const absl::Status& reason) {
  std::vector<std::shared_ptr<ServedNode>> sinks;
  {
    MutexLock lock(mutex_);
    sinks = FailLocked(reason);
  }
  Tell(sinks, OfJob(spec_.job, reason));
}

std::vector<std::shared_ptr<ServedNode>> Job::FailLocked(const absl::Status& reason) {
  if (!failure_.ok()) return {};
  const absl::Status failure = OfJob(spec_.job, reason);
  failure_ = absl::Status(failure.code(), Printable(failure.message(), kMaxReasonBytes));
  const size_t open_rounds = rounds_.open_rounds();
  tally_.CountFailure(failure_.code(), open_rounds);
  faults_.AddFailure(spec_.job, failure_, open_rounds, Now());
  return ReleaseLocked();
}

std::vector<std::shared_ptr<ServedNode>> Job::ReleaseLocked() {
  std::vector<std::shared_ptr<ServedNode>> sinks;
  rounds_.Release();  // they can never complete
  UpdateMemoryLocked();
  if (!members_.IsComplete()) return sinks;  // WhenComplete tells the nodes
  for (const auto& sink : sinks_) {
    if (sink != nullptr) sinks.push_back(sink);
  }
  return sinks;
}

void Job::UpdateMemoryLocked() {
  if (!failure_.ok() || members_.IsEmpty()) {
    memory_.End();
  } else {
    memory_.Show();
  }
}

void Job::Tell(const std::vector<std::shared_ptr<ServedNode>>& sinks, const absl::Status& why) {
  for (const auto& sink : sinks) sink->OnFailed(why);
}

bool Job::IsEmpty() {
  MutexLock lock(mutex_);
  return members_.IsEmpty();
}

absl::Status Job::WhyOver() {
  MutexLock lock(mutex_);
  return WhyOverLocked();
}

absl::Status Job::WhyOverLocked() const {
  const bool joins_again = !members_.IsComplete() || absl::IsNotFound(failure_);
  return joins_again ? absl::OkStatus() : failure_;
}

bool Job::IsUnderWay(TimePoint now) {
  MutexLock lock(mutex_);
  return failure_.ok() && members_.IsInUse(now);
}

absl::Status Job::CheckActiveLocked(uint32_t node) const {
  return failure_.ok() ? members_.CheckActive(node) : failure_;
}

absl::Status Job::HearLocked(uint32_t node, TimePoint now) {
  return failure_.ok() ? members_.Hear(node, now) : failure_;
}

}  // namespace thalweg
