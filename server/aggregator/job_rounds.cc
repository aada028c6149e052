// This file holds the parts of Job through which a round goes: from contributions to its result.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "core/exchange/of_job.h"
#include "server/aggregator/job.h"
#include "server/round/fold.h"
#include "server/round/update.h"

namespace thalweg {

absl::Status Job::Contribute(uint32_t node, Contribution contribution, TimePoint now) {
  if (IsLetter(contribution.id)) return PassOn(node, std::move(contribution), now);
  Held held;
  std::optional<RoundResult> missed;
  std::shared_ptr<ServedNode> sink;
  absl::Status status;
  {
    MutexLock lock(mutex_);
    THALWEG_RETURN_IF_ERROR(CheckActiveLocked(node));
    members_.Hear(node, now);
    sink = peers_[node].sink;
    if (!resumption_.Ask(node, contribution.id, &missed)) {
      auto taken = HoldLocked(node, std::move(contribution), now);
      status = taken.status();
      if (taken.ok()) held = *std::move(taken);
    }
    UpdateMemoryLocked();
  }
  if (missed && sink != nullptr) sink->OnResult(*std::move(missed));
  if (held.completed) status = Deliver(*held.completed);
  if (status.ok() && held.asked) status = Answer(*held.asked);
  if (!status.ok()) Fail(status);
  return OfJob(spec_.job, status);
}

absl::StatusOr<Job::Held> Job::HoldLocked(uint32_t node, Contribution contribution, TimePoint now) {
  THALWEG_RETURN_IF_ERROR(ReserveKeptLocked(node, contribution.id.chunk));
  const RoundId id = contribution.id;
  const bool is_one_shot = IsOneShot(id);
  const uint64_t bytes = contribution.payload.SizeBytes();
  LayoutRegistry::Known known{{}, {{contribution.wire}, static_cast<double>(bytes)}};
  if (is_one_shot) {
    THALWEG_RETURN_IF_ERROR(CheckOneShotLocked(node, contribution));
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

absl::Status Job::CheckOneShotLocked(uint32_t node, const Contribution& contribution) const {
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
    return refused(absl::StrCat(members_.Name(node), " gives ", bytes, " bytes for ",
                                contribution.elems, " elements in ", Name(contribution.wire),
                                " to '", ToString(contribution.collective), "'"));
  }
  if (bytes <= plan_.flow().chunk_bytes) return absl::OkStatus();
  return refused(
      absl::StrCat("chunks have at most ", plan_.flow().chunk_bytes, " bytes, got ", bytes));
}

absl::Status Job::Deliver(const Completed& completed) {
  const CompleteRound& round = completed.round;
  if (!round.answers.empty() && round.payloads.empty()) return GiveWeights(completed);
  uint64_t epoch = 0;
  std::vector<std::shared_ptr<ServedNode>> sinks, others;
  {
    MutexLock lock(mutex_);
    epoch = members_.epoch();
    sinks = SinksLocked(round.results);
    others = SinksLocked(round.receipts);
  }
  WorkTimes times;
  times.begin = Now();
  AppliedUpdate applied;
  RoundResult& result = applied.result;
  THALWEG_ASSIGN_OR_RETURN(result, FoldRound(round, epoch, completed.state.get()));
  times.folded = Now();
  const LayoutRegistry::Update& update = completed.update;
  if (completed.step != nullptr) {
    THALWEG_ASSIGN_OR_RETURN(applied, Update(completed, result));
  } else if (update.rule != nullptr) {
    THALWEG_ASSIGN_OR_RETURN(result, KeepMean(result, *update.pieces, *completed.state));
  }
  if (round.is_lone) result.workers = spec_.world_size;  // nobody is missing
  times.end = update.rule == nullptr ? times.folded : Now();
  // Sums stand for no gradient.
  const bool has_sums = update.rule != nullptr && result.wire == WireFormat::kFloat64;
  CountDelivery(result, has_sums ? 0 : completed.raw_bytes, sinks.size(), times);
  for (const auto& sink : sinks) sink->OnResult(result);
  if (!others.empty()) {
    RoundResult receipt = result;
    receipt.payload = Payload();
    for (const auto& sink : others) sink->OnResult(receipt);
  }
  for (const auto& [node, number] : round.answers) {
    Send({node, number}, applied, completed.raw_bytes);
  }
  if (applied.version != 0) AnswerAsks(completed, applied);
  if (trace_) TraceRound(completed, applied, times);
  return absl::OkStatus();
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
