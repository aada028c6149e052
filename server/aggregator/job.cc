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
      waited_for_(metrics.ByNode(&ShardMetrics::WaitedFor, first.num_nodes)),
      late_(metrics.ByNode(&ShardMetrics::Late, first.num_nodes)),
      delivery_(spec_, metrics, trace, *this),
      snapshots_(snapshots),
      held_(snapshots == nullptr ? nullptr : snapshots->Hold(spec_.identity)),
      members_(first),
      peers_(first.num_nodes),
      plan_(spec_, max_window_chunks),
      layouts_(first.chunk_bytes, first.num_shards, first.num_nodes),
      engine_({members_.epoch(), first.num_nodes, 0, first.round_timeout}),
      quorum_(first.num_nodes),
      memory_(first, memory, metrics),
      letters_(first.num_nodes) {}

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
      if (refusal.ok() && request.resume) refusal = resumption_.Add(request.node, *request.resume);
      if (refusal.ok()) {
        memory_.ChargeTo(std::move(account));
        refusal = ReserveLocked();
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
  peers_[request.node].sink = std::move(node);
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
    // A node that lacks the last results of a layout still uses it, when others have the next one.
    if (spec_.resume && layouts_.IsReplaced(bucket.id)) return absl::OkStatus();
    if (spec_.losses.min_nodes > 0 && bucket.update && bucket.update->quorum == 0) {
      status = absl::InvalidArgumentError(
          "weights that are kept here need all nodes: the job cannot go on when one is lost "
          "(THALWEG_MIN_NODES)");
    }
    if (status.ok()) status = layouts_.Register(members_.Name(node), bucket);
    if (status.ok()) engine_.AllowPart(bucket.id.part);
    if (status.ok()) lone_.DropOlderLayouts(bucket.id);
    if (status.ok()) quorum_.DropOlderLayouts(bucket.id);
    if (status.ok() && engine_.DropOlderLayouts(bucket.id) > 0) {
      status = absl::FailedPreconditionError(
          absl::StrCat(members_.Name(node), " announced bucket ", ToString(bucket.id),
                       " while a round of its earlier layout is open"));
    }
    if (status.ok()) status = ReserveLocked();
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
    if (status.ok()) status = engine_.SetGroup(group);
    if (status.ok()) status = ReserveLocked();
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
    peers_[node].sink = nullptr;
    metrics_.nodes.Add(-1);
    if (!reason.ok()) {
      failure = members_.Blame(node, reason);
      auto lost = LoseLocked(node, failure, Now());
      if (!lost.ok()) failure = lost.status();
      if (lost.ok() && lost->has_value()) {
        loss = *std::move(lost);
        failure = absl::OkStatus();
      }
    } else if (const auto open = engine_.OldestWaitingFor(node)) {
      failure = absl::AbortedError(IsOneShot(open->id)
                                       ? absl::StrCat(members_.Name(node), " left while ",
                                                      ToString(open->id), " waited for it")
                                       : absl::StrCat(members_.Name(node), " left while round ",
                                                      open->id.round, " of bucket ",
                                                      ToString(open->id.bucket), " waited for it"));
    } else {
      const absl::Status left = absl::AbortedError(absl::StrCat(members_.Name(node), " left"));
      failure = AddToLossLocked(quorum_.Remove(node, Now()), node, left, Now(), &loss.emplace());
    }
    if (members_.IsEmpty()) chunks_ = ChunkStates();
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
  return has_snapshots_;
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
  if (auto ripe = quorum_.Ripe(now); !ripe.empty()) {
    const uint32_t node = ripe.front().answers.back().first;
    THALWEG_RETURN_IF_ERROR(AddToLossLocked({std::move(ripe), {}}, node, absl::OkStatus(), now,
                                            &losses->emplace_back()));
  }
  auto expired = engine_.Expired(now);
  if (expired.empty()) expired = quorum_.Expired(now, spec_.round_timeout);
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
  metrics_.jobs_ended.Add(failure_.code());
  metrics_.rounds.Add(failure_.code(), static_cast<double>(engine_.open_rounds()));
  tally_.rounds_lost = engine_.open_rounds();
  faults_.AddFailure(spec_.job, failure_, tally_.rounds_lost, Now());
  return ReleaseLocked();
}

std::vector<std::shared_ptr<ServedNode>> Job::ReleaseLocked() {
  std::vector<std::shared_ptr<ServedNode>> sinks;
  // The rounds can never complete, so their payloads and layouts are released at once.
  engine_ = RoundEngine(
      {members_.epoch(), spec_.num_nodes, plan_.flow().window_chunks, spec_.round_timeout});
  quorum_ = QuorumRounds(spec_.num_nodes);
  lone_ = LoneRounds();
  settings_ = StepSettings();
  chunks_ = ChunkStates();
  resumption_ = Resumption();
  layouts_ = LayoutRegistry(plan_.flow().chunk_bytes, spec_.num_shards, spec_.num_nodes);
  UpdateMemoryLocked();
  if (!members_.IsComplete()) return sinks;  // WhenComplete tells the nodes
  for (const Peer& peer : peers_) {
    if (peer.sink != nullptr) sinks.push_back(peer.sink);
  }
  return sinks;
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
