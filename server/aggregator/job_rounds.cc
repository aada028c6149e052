// This file holds the parts of Job through which a round goes: from contributions to its result.
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
  std::optional<Completed> completed;
  std::optional<RoundResult> missed;
  std::shared_ptr<ServedNode> sink;
  absl::Status status;
  {
    MutexLock lock(mutex_);
    THALWEG_RETURN_IF_ERROR(CheckActiveLocked(node));
    members_.Hear(node, now);
    sink = peers_[node].sink;
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
  if (const absl::Status left = members_.CheckNoneLeft(); !left.ok()) {
    return absl::Status(
        left.code(), absl::StrCat(ToString(contribution.id), " cannot complete: ", left.message()));
  }
  THALWEG_RETURN_IF_ERROR(CheckKeptLocked(node, contribution.id.chunk));
  const bool is_one_shot = IsOneShot(contribution.id);
  THALWEG_RETURN_IF_ERROR(is_one_shot ? CheckOneShotLocked(node, contribution)
                                      : layouts_.Check(node, contribution));
  const uint64_t bytes = contribution.payload.SizeBytes();
  const LayoutRegistry::Weight weight =
      is_one_shot ? LayoutRegistry::Weight{{contribution.wire}, static_cast<double>(bytes)}
                  : layouts_.WeightOf(contribution.id.bucket, contribution.elems);
  const ServedNode* sink = peers_[node].sink.get();
  auto added =
      engine_.Add(node, std::move(contribution), now, sink == nullptr ? 0 : sink->Backlog());
  if (!added.ok()) {
    return absl::Status(added.status().code(),
                        absl::StrCat(members_.Name(node), ": ", added.status().message()));
  }
  CountLocked(node, weight, bytes, *added);
  if (!added->completed) return std::nullopt;
  Completed completed{.round = *std::move(added->completed),
                      .state = nullptr,
                      .raw_bytes = weight.raw_bytes,
                      .last_node = node,
                      .at = now};
  const CompleteRound& round = completed.round;
  // Not when the layout is announced: the first node may still want to read and move them.
  if (!is_one_shot && round.id.round == 1) chunks_.DropOlderLayouts(round.id.bucket);
  if (!is_one_shot) THALWEG_RETURN_IF_ERROR(FindStateLocked(completed));
  return completed;
}

absl::Status Job::CheckOneShotLocked(uint32_t node, const Contribution& contribution) const {
  const uint64_t bytes = contribution.payload.SizeBytes();
  const auto refused = [&](const std::string& why) {
    return absl::InvalidArgumentError(absl::StrCat(ToString(contribution.id), ": ", why));
  };
  if (!IsDense(contribution.wire)) {
    return refused(absl::StrCat(Name(contribution.wire), " is for buckets only"));
  }
  if (contribution.collective == kPull) return refused("only buckets have weights to pull");
  if (!HasRightSize(node, contribution)) {
    return refused(absl::StrCat(members_.Name(node), " gives ", bytes, " bytes for ",
                                contribution.elems, " elements in ", Name(contribution.wire),
                                " to '", ToString(contribution.collective), "'"));
  }
  if (bytes <= flow_.chunk_bytes) return absl::OkStatus();
  return refused(absl::StrCat("chunks have at most ", flow_.chunk_bytes, " bytes, got ", bytes));
}

absl::Status Job::Deliver(const Completed& completed) {
  const CompleteRound& round = completed.round;
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
  THALWEG_ASSIGN_OR_RETURN(RoundResult result, FoldRound(round, epoch, completed.state.get()));
  times.folded = Now();
  const LayoutRegistry::Update& update = completed.update;
  if (completed.step != nullptr) {
    THALWEG_ASSIGN_OR_RETURN(result, UpdateWeights(result, *update.rule, *update.pieces,
                                                   *completed.step, *completed.state));
  } else if (update.rule != nullptr) {
    THALWEG_ASSIGN_OR_RETURN(result, KeepMean(result, *update.pieces, *completed.state));
  }
  times.end = update.rule == nullptr ? times.folded : Now();
  CountDelivery(result, completed.raw_bytes, sinks.size(), times);
  for (const auto& sink : sinks) sink->OnResult(result);
  if (!others.empty()) {
    RoundResult receipt = result;
    receipt.payload = Payload();
    for (const auto& sink : others) sink->OnResult(receipt);
  }
  if (trace_) TraceRound(completed, result, times);
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
