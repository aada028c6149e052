// This file holds the parts of Job that take contributions to rounds.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "core/exchange/of_job.h"
#include "server/aggregator/job.h"

namespace thalweg {
namespace {

// Checks a contribution to a one-shot round, which has no layout, by itself.
absl::Status CheckOneShot(const std::string& name, uint32_t node, const Contribution& contribution,
                          uint64_t chunk_bytes) {
  const uint64_t bytes = contribution.payload.SizeBytes();
  const auto refused = [&](const std::string& why) {
    return absl::InvalidArgumentError(absl::StrCat(ToString(contribution.id), ": ", why));
  };
  if (GroupOf(contribution.id) == 0) return refused("the job as a whole has buckets only");
  if (!IsDense(contribution.wire)) {
    return refused(absl::StrCat(Name(contribution.wire), " is for buckets only"));
  }
  if (contribution.collective == kPull) return refused("only buckets have weights to pull");
  if (!HasRightSize(node, contribution)) {
    return refused(absl::StrCat(name, " gives ", bytes, " bytes for ", contribution.elems,
                                " elements in ", Name(contribution.wire), " to '",
                                ToString(contribution.collective), "'"));
  }
  if (bytes <= chunk_bytes) return absl::OkStatus();
  return refused(absl::StrCat("chunks have at most ", chunk_bytes, " bytes, got ", bytes));
}

}  // namespace

absl::Status Job::Contribute(uint32_t node, Contribution contribution, TimePoint now) {
  if (IsLetter(contribution.id)) return PassOn(node, std::move(contribution), now);
  Held held;
  std::optional<RoundResult> missed;
  std::shared_ptr<ServedNode> sink;
  absl::Status status;
  {
    MutexLock lock(mutex_);
    THALWEG_RETURN_IF_ERROR(HearLocked(node, now));
    sink = peers_[node].sink;
    if (!resumption_.Ask(node, contribution.id, &missed)) {
      auto taken = HoldLocked(node, std::move(contribution), now);
      status = taken.status();
      if (taken.ok()) held = *std::move(taken);
    }
    UpdateMemoryLocked();
  }
  if (missed && sink != nullptr) sink->OnResult(*std::move(missed));
  if (held.completed) status = delivery_.Deliver(*held.completed);
  if (status.ok() && held.asked) status = delivery_.Answer(*held.asked);
  if (!status.ok()) Fail(status);
  return OfJob(spec_.job, status);
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
    if (status.ok() && letters_.Begin()) status = ReserveLocked();
    if (status.ok()) sink = peers_[letter.collective.to.node].sink;
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

absl::StatusOr<Job::Held> Job::HoldLocked(uint32_t node, Contribution contribution, TimePoint now) {
  THALWEG_RETURN_IF_ERROR(ReserveKeptLocked(node, contribution.id.chunk));
  const RoundId id = contribution.id;
  const bool is_one_shot = IsOneShot(id);
  const uint64_t bytes = contribution.payload.SizeBytes();
  LayoutRegistry::Known known{{}, {{contribution.wire}, static_cast<double>(bytes)}};
  if (is_one_shot) {
    THALWEG_RETURN_IF_ERROR(
        CheckOneShot(members_.Name(node), node, contribution, plan_.flow().chunk_bytes));
  } else {
    THALWEG_ASSIGN_OR_RETURN(known, layouts_.Check(node, contribution));
  }
  const auto& [update, weight] = known;
  const bool is_apart = update.rule != nullptr && update.rule->has_own_rounds();
  if (const absl::Status left = members_.CheckNoneLeft(); !is_apart && !left.ok()) {
    return absl::Status(left.code(),
                        absl::StrCat(ToString(id), " cannot complete: ", left.message()));
  }
  RoundResult contributed;  // without values
  contributed.id = id;
  contributed.epoch = contribution.epoch;
  contributed.elems = contribution.elems;
  THALWEG_ASSIGN_OR_RETURN(RoundEngine::Added added,
                           AddLocked(node, std::move(contribution), update.rule, now));
  CountLocked(node, weight, bytes, added);
  Held held;
  const bool is_ahead = update.rule != nullptr && update.rule->ahead > 0;
  std::optional<uint64_t> least = added.late.answer;
  if (is_ahead && (added.completed || added.verdict == RoundEngine::Verdict::kHeld)) {
    least = id.round - std::min<uint64_t>(id.round, update.rule->ahead);
  }
  if (least) {
    THALWEG_ASSIGN_OR_RETURN(held.asked,
                             AskedLocked(node, contributed, *least, update.rule, weight.raw_bytes));
  }
  if (!added.completed) return held;
  Completed& completed = held.completed.emplace(Completed{.round = *std::move(added.completed),
                                                          .state = nullptr,
                                                          .raw_bytes = weight.raw_bytes,
                                                          .last_node = node,
                                                          .at = now});
  if (is_ahead) completed.round.results.clear();  // nodes get what they ask for
  // Not when the layout is announced: the first node may still want to read and move them.
  if (!is_one_shot && id.round == 1) chunks_.DropOlderLayouts(id.bucket);
  if (!is_one_shot) THALWEG_RETURN_IF_ERROR(FindStateLocked(completed));
  return held;
}

Delivery::Recipients::Audience Job::AudienceOf(const CompleteRound& round) {
  MutexLock lock(mutex_);
  return {members_.epoch(), SinksLocked(round.results), SinksLocked(round.receipts)};
}

std::shared_ptr<ServedNode> Job::Find(uint32_t node) {
  MutexLock lock(mutex_);
  return peers_[node].sink;
}

std::vector<std::shared_ptr<ServedNode>> Job::SinksLocked(
    const std::vector<uint32_t>& nodes) const {
  std::vector<std::shared_ptr<ServedNode>> sinks;
  for (const uint32_t node : nodes) {
    if (peers_[node].sink != nullptr) sinks.push_back(peers_[node].sink);
  }
  return sinks;
}

}  // namespace thalweg
