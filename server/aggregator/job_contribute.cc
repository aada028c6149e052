// This file holds the parts of Job that take contributions to rounds.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "core/exchange/of_job.h"
#include "server/aggregator/job.h"

namespace thalweg {
absl::Status Job::Contribute(uint32_t node, Contribution contribution, TimePoint now) {
  if (IsLetter(contribution.id)) return PassOn(node, std::move(contribution), now);
  absl::StatusOr<JobRounds::Held> held;
  std::shared_ptr<ServedNode> sink;
  {
    MutexLock lock(mutex_);
    THALWEG_RETURN_IF_ERROR(HearLocked(node, now));
    sink = sinks_[node];
    held = HoldLocked(node, std::move(contribution), now);
    UpdateMemoryLocked();
  }
  absl::Status status = held.status();
  if (status.ok() && held->missed && sink != nullptr) sink->OnResult(*std::move(held->missed));
  if (status.ok() && held->completed) status = delivery_.Deliver(*held->completed);
  if (status.ok() && held->asked) status = delivery_.Answer(*held->asked);
  if (!status.ok()) Fail(status);
  return OfJob(spec_.job, status);
}

absl::StatusOr<JobRounds::Held> Job::HoldLocked(uint32_t node, Contribution contribution,
                                                TimePoint now) {
  uint32_t backlog = 0;
  if (const ServedNode* const sink = sinks_[node].get(); sink != nullptr) {
    backlog = sink->Backlog();
    THALWEG_RETURN_IF_ERROR(CheckKeptLocked(node, sink->KeptResults(contribution.id.chunk)));
  }
  THALWEG_ASSIGN_OR_RETURN(JobRounds::Held held,
                           rounds_.Hold(node, std::move(contribution), now, backlog));
  // A contribution whose consequences have failed the job is not counted either.
  if (!held.counted) return held;
  if (held.counted->late) delivery_.CountStaleness(node, held.counted->late->updates);
  tally_.Count(node, held);
  THALWEG_RETURN_IF_ERROR(memory_.ReserveStates());
  return held;
}

absl::Status Job::CheckKeptLocked(uint32_t node, const ServedNode::Kept& kept) {
  // What a node contributes has a place in its windows, of which the results that it had not
  // received take the others.
  const uint64_t window = rounds_.window_of(node);
  if (kept.results < window) return memory_.ReserveStreams(kept.streams);
  return absl::ResourceExhaustedError(absl::StrCat(
      members_.Name(node), " has acknowledged none of the last ", kept.results,
      " results of a stream, expected to have received all but fewer than its windows of ", window,
      " chunks"));
}

absl::Status Job::PassOn(uint32_t node, Contribution letter, TimePoint now) {
  const uint64_t bytes = letter.payload.SizeBytes();
  std::shared_ptr<ServedNode> sink;
  absl::Status status;
  RoundResult result;
  {
    MutexLock lock(mutex_);
    THALWEG_RETURN_IF_ERROR(HearLocked(node, now));
    status = letters_.Check(members_.Name(node), node, letter, members_.epoch(),
                            plan_.flow().chunk_bytes);
    if (status.ok() && letters_.Begin()) status = memory_.Reserve();
    if (status.ok()) sink = sinks_[letter.collective.to.node];
    // A receipt, which has no number, says nothing to a node that has left.
    if (status.ok() && sink == nullptr && letter.id.round == 0) return absl::OkStatus();
    if (status.ok() && sink == nullptr) {
      status = absl::FailedPreconditionError(
          absl::StrCat(ToString(letter.id),
                       " cannot arrive: ", members_.Name(letter.collective.to.node), " has left"));
    }
    if (status.ok()) result = letters_.Take(std::move(letter));
  }
  if (!status.ok()) {
    Fail(status);
    return OfJob(spec_.job, status);
  }
  delivery_.CountPassedOn(bytes);
  sink->OnResult(std::move(result));
  return absl::OkStatus();
}

Delivery::Recipients::Audience Job::AudienceOf(const CompleteRound& round) {
  MutexLock lock(mutex_);
  return {members_.epoch(), SinksLocked(round.results), SinksLocked(round.receipts)};
}

std::shared_ptr<ServedNode> Job::Find(uint32_t node) {
  MutexLock lock(mutex_);
  return sinks_[node];
}

std::vector<std::shared_ptr<ServedNode>> Job::SinksLocked(
    const std::vector<uint32_t>& nodes) const {
  std::vector<std::shared_ptr<ServedNode>> sinks;
  for (const uint32_t node : nodes) {
    if (sinks_[node] != nullptr) sinks.push_back(sinks_[node]);
  }
  return sinks;
}

}  // namespace thalweg
