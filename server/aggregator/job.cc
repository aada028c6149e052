#include "server/aggregator/job.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/printable.h"
#include "core/base/protocol.h"
#include "core/base/status_macros.h"
#include "core/exchange/of_job.h"
#include "server/round/fold.h"

namespace thalweg {
namespace {

std::string Seconds(Duration d) { return absl::StrCat(ToSeconds(d), " s"); }

JoinRequest WithoutRounds(JoinRequest request) {
  request.resume.reset();
  return request;
}

std::vector<Counter*> WaitedFor(const ShardMetrics& metrics, uint32_t num_nodes) {
  std::vector<Counter*> counters;
  for (uint32_t node = 0; node < num_nodes; ++node) counters.push_back(&metrics.WaitedFor(node));
  return counters;
}

}  // namespace

Job::Job(const JoinRequest& first, uint32_t max_window_chunks, MemoryBudget& memory,
         ShardMetrics& metrics, FaultLog& faults, TraceWriter* trace)
    : spec_(WithoutRounds(first)),
      resumes_(first.resume.has_value()),
      max_window_chunks_(max_window_chunks),
      metrics_(metrics),
      faults_(faults),
      waited_for_(WaitedFor(metrics, first.num_nodes)),
      trace_(trace, "shard", first.job, {{"num_nodes", first.num_nodes}}),
      members_(first.num_nodes),
      costs_(first.costs.size()),
      rates_(first.num_nodes, HostsOf(first)),
      layouts_(first.chunk_bytes, first.num_shards),
      engine_({kEpoch, first.num_nodes, 0, first.round_timeout}),
      reservation_(std::in_place, memory) {}

absl::Status Job::AddMember(const JoinRequest& request, std::shared_ptr<ServedNode> node,
                            TimePoint now, std::shared_ptr<TenantAccount> account) {
  absl::Status refusal;
  bool fatal = false;
  {
    MutexLock lock(mutex_);
    if (!failure_.ok()) return failure_;
    refusal = CheckSameJob(request);
    fatal = !refusal.ok() && !IsCompleteLocked();
    if (refusal.ok() && members_[request.node].has_joined) {
      refusal = absl::AlreadyExistsError(absl::StrCat(
          "job '", spec_.job, "' has a node ", request.node,
          " already: ", members_[request.node].name, "; the newcomer is ", request.node_name));
    }
    if (refusal.ok()) {
      refusal = CheckWorkersLocked(request);
      if (refusal.ok()) refusal = GatherRoundsLocked(request);
      fatal = !refusal.ok();
    }
    if (refusal.ok()) SeatLocked(request, std::move(node), now, std::move(account));
  }
  if (fatal) {
    Fail(refusal);
  } else if (!refusal.ok()) {
    faults_.AddRefusal(spec_.job, refusal, now);
  }
  return OfJob(spec_.job, refusal);
}

void Job::SeatLocked(const JoinRequest& request, std::shared_ptr<ServedNode> node, TimePoint now,
                     std::shared_ptr<TenantAccount> account) {
  members_[request.node] = {
      .has_joined = true,
      .name = absl::StrCat("node ", request.node, " (", request.node_name, ")"),
      .host = request.node_name,
      .workers = request.workers,
      .last_heard = now,
      .sink = std::move(node)};
  ++joined_;
  ++present_;
  metrics_.nodes.Add(1);
  LearnLocked(request);
  if (account_ == nullptr && account != nullptr) {
    // Nothing is reserved before all nodes have joined.
    account_ = std::move(account);
    reservation_.emplace(account_->memory);
  }
  if (IsCompleteLocked()) {
    const absl::Status begun = BeginLocked(now);
    if (!begun.ok()) FailLocked(begun);  // WhenComplete tells the nodes
  }
}

std::shared_ptr<const TenantAccount> Job::account() {
  MutexLock lock(mutex_);
  return account_;
}

absl::Status Job::RegisterBucket(uint32_t node, const BucketAnnouncement& bucket) {
  absl::Status status;
  {
    MutexLock lock(mutex_);
    THALWEG_RETURN_IF_ERROR(CheckActiveLocked(node));
    // A node that lacks the last results of a layout still uses it, when others have the next one.
    if (resumes_ && layouts_.IsReplaced(bucket.id)) return absl::OkStatus();
    status = layouts_.Register(NameLocked(node), bucket);
    if (status.ok()) engine_.AllowPart(bucket.id.part);
    if (status.ok() && engine_.DropOlderLayouts(bucket.id) > 0) {
      status = absl::FailedPreconditionError(
          absl::StrCat(NameLocked(node), " announced bucket ", ToString(bucket.id),
                       " while a round of its earlier layout is open"));
    }
    if (status.ok()) status = ReserveLocked();
    UpdateMemoryLocked();
  }
  if (!status.ok()) Fail(status);
  return OfJob(spec_.job, status);
}

absl::Status Job::Contribute(uint32_t node, Contribution contribution, TimePoint now) {
  std::optional<Completed> completed;
  std::optional<RoundResult> missed;
  std::shared_ptr<ServedNode> sink;
  absl::Status status;
  {
    MutexLock lock(mutex_);
    THALWEG_RETURN_IF_ERROR(CheckActiveLocked(node));
    members_[node].last_heard = now;
    sink = members_[node].sink;
    if (!resumption_.Ask(node, contribution.id, &missed)) {
      auto held = HoldLocked(node, std::move(contribution), now);
      status = held.status();
      if (held.ok()) completed = *std::move(held);
    }
    UpdateMemoryLocked();
  }
  if (missed && sink != nullptr) sink->OnResult(*std::move(missed));
  if (completed) status = Deliver(*completed);
  if (!status.ok()) Fail(status);
  return OfJob(spec_.job, status);
}

absl::StatusOr<std::optional<Job::Completed>> Job::HoldLocked(uint32_t node,
                                                              Contribution contribution,
                                                              TimePoint now) {
  for (const Member& member : members_) {
    if (!member.has_left) continue;
    return absl::AbortedError(absl::StrCat("bucket ", ToString(contribution.id.bucket), " round ",
                                           contribution.id.round, " cannot complete: ", member.name,
                                           " has left the job"));
  }
  THALWEG_RETURN_IF_ERROR(layouts_.Check(contribution));
  const uint64_t bytes = contribution.payload.SizeBytes();
  const LayoutRegistry::Weight weight =
      layouts_.WeightOf(contribution.id.bucket, contribution.elems);
  const ServedNode* sink = members_[node].sink.get();
  auto added =
      engine_.Add(node, std::move(contribution), now, sink == nullptr ? 0 : sink->Backlog());
  if (!added.ok()) {
    return absl::Status(added.status().code(),
                        absl::StrCat(NameLocked(node), ": ", added.status().message()));
  }
  CountLocked(node, weight, bytes, *added);
  if (!added->completed) return std::nullopt;
  Completed completed{*std::move(added->completed), nullptr, weight.raw_bytes, node, now};
  const RoundEngine::CompleteRound& round = completed.round;
  // Not when the layout is announced: the first node may still want to read and move them.
  if (round.id.round == 1) residuals_.DropOlderLayouts(round.id.bucket);
  if (HasResidual(round.wire)) {
    const auto& [bucket, chunk, number] = round.id;
    completed.residual = residuals_.Find(bucket, chunk);
    if (completed.residual == nullptr) {
      completed.residual =
          residuals_.Get(bucket, chunk, round.elems, layouts_.Padding(bucket, chunk));
      NoteLostResidualLocked(round.id);
      THALWEG_RETURN_IF_ERROR(ReserveLocked());
    }
  }
  return completed;
}

absl::Status Job::Deliver(const Completed& completed) {
  std::vector<uint32_t> workers;
  std::vector<std::shared_ptr<ServedNode>> sinks;
  {
    MutexLock lock(mutex_);
    for (const Member& member : members_) {
      workers.push_back(member.workers);
      if (member.sink != nullptr) sinks.push_back(member.sink);
    }
  }
  const TimePoint start = Now();
  THALWEG_ASSIGN_OR_RETURN(const RoundResult result,
                           Fold(completed.round, workers, kEpoch, completed.residual.get()));
  const TimePoint end = Now();
  CountDelivery(result, completed.raw_bytes, sinks.size(), end - start);
  for (const auto& sink : sinks) sink->OnResult(result);
  if (trace_) TraceRound(completed, result, start, end);
  return absl::OkStatus();
}

absl::Status Job::Heartbeat(uint32_t node, TimePoint now) {
  MutexLock lock(mutex_);
  THALWEG_RETURN_IF_ERROR(CheckActiveLocked(node));
  members_[node].last_heard = now;
  return absl::OkStatus();
}

void Job::RemoveMember(uint32_t node, const absl::Status& reason) {
  absl::Status failure;
  std::vector<std::shared_ptr<ServedNode>> sinks;
  {
    MutexLock lock(mutex_);
    Member& member = members_[node];
    if (!member.has_joined || member.has_left) return;
    member.has_left = true;
    member.sink = nullptr;
    --present_;
    metrics_.nodes.Add(-1);
    if (!reason.ok()) {
      // A sidecar that reports why the job failed has named the culprit; otherwise the leaving node
      // is it.
      failure =
          IsOfJob(spec_.job, reason)
              ? reason
              : absl::Status(reason.code(), absl::StrCat(member.name, ": ", reason.message()));
      // To a sink, NotFound would mean that this shard has been restarted.
      if (absl::IsNotFound(failure)) failure = absl::AbortedError(failure.message());
    } else if (const auto open = engine_.OldestWaitingFor(node)) {
      failure = absl::AbortedError(absl::StrCat(member.name, " left while round ", open->id.round,
                                                " of bucket ", ToString(open->id.bucket),
                                                " waited for it"));
    }
    if (present_ == 0) residuals_ = ResidualStore();
    // This runs under the same lock, so that no other call finds the node gone and reports that as
    // the reason.
    if (!failure.ok()) sinks = FailLocked(failure);
    if (present_ == 0 && failure_.ok()) metrics_.jobs_ended.Add(absl::StatusCode::kOk);
    UpdateMemoryLocked();
  }
  Tell(sinks, OfJob(spec_.job, failure));
}

void Job::Tick(TimePoint now) {
  std::optional<absl::Status> failure;
  {
    MutexLock lock(mutex_);
    if (failure_.ok() && IsCompleteLocked()) failure = FindFailureLocked(now);
  }
  if (failure) Fail(*failure);
  AnswerWaiting(now);
}

std::optional<absl::Status> Job::FindFailureLocked(TimePoint now) const {
  for (const Member& member : members_) {
    if (member.has_left || now - member.last_heard <= kLease) continue;
    return absl::UnavailableError(
        absl::StrCat(member.name, " has sent nothing for ", Seconds(kLease)));
  }
  const auto expired = engine_.Expired(now);
  if (expired.empty()) return std::nullopt;
  const RoundEngine::OpenRound& round = expired.front();
  return absl::DeadlineExceededError(absl::StrCat(
      "bucket ", ToString(round.id.bucket), " round ", round.id.round, " chunk ", round.id.chunk,
      " waited ", Seconds(spec_.round_timeout), " for ", NamesLocked(round.missing),
      "; if that is a long but healthy pause, raise the timeout (THALWEG_STEP_TIMEOUT)"));
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
  std::vector<std::shared_ptr<ServedNode>> sinks;
  if (!failure_.ok()) return sinks;
  const absl::Status failure = OfJob(spec_.job, reason);
  failure_ = absl::Status(failure.code(), Printable(failure.message(), kMaxReasonBytes));
  metrics_.jobs_ended.Add(failure_.code());
  metrics_.rounds.Add(failure_.code(), static_cast<double>(engine_.open_rounds()));
  tally_.rounds_lost = engine_.open_rounds();
  faults_.AddFailure(spec_.job, failure_, tally_.rounds_lost, Now());
  // The rounds can never complete, so their payloads and layouts are released at once.
  engine_ = RoundEngine({kEpoch, spec_.num_nodes, flow_.window_chunks, spec_.round_timeout});
  residuals_ = ResidualStore();
  resumption_ = Resumption();
  layouts_ = LayoutRegistry(flow_.chunk_bytes, spec_.num_shards);
  UpdateMemoryLocked();
  if (!IsCompleteLocked()) return sinks;  // WhenComplete tells the nodes
  for (const Member& member : members_) {
    if (member.sink != nullptr) sinks.push_back(member.sink);
  }
  return sinks;
}

void Job::Tell(const std::vector<std::shared_ptr<ServedNode>>& sinks, const absl::Status& why) {
  for (const auto& sink : sinks) sink->OnFailed(why);
}

bool Job::IsEmpty() {
  MutexLock lock(mutex_);
  return present_ == 0;
}

bool Job::IsCompleteLocked() const { return joined_ == spec_.num_nodes; }

std::string Job::NameLocked(uint32_t node) const { return members_[node].name; }

std::string Job::NamesLocked(const std::vector<uint32_t>& nodes) const {
  std::vector<std::string> names;
  for (uint32_t node : nodes) names.push_back(NameLocked(node));
  return absl::StrJoin(names, ", ");
}

std::string Job::MissingMembersLocked() const {
  std::vector<uint32_t> missing;
  for (uint32_t node = 0; node < members_.size(); ++node) {
    if (!members_[node].has_joined) missing.push_back(node);
  }
  return absl::StrCat(missing.size() == 1 ? "node " : "nodes ", absl::StrJoin(missing, ", "),
                      " of ", spec_.num_nodes);
}

absl::Status Job::CheckActiveLocked(uint32_t node) const {
  if (!failure_.ok()) return failure_;
  if (!IsCompleteLocked()) return absl::FailedPreconditionError("the job is not complete yet");
  if (members_[node].has_left) return absl::NotFoundError("this node has left the job");
  return absl::OkStatus();
}

}  // namespace thalweg
