#include "server/aggregator/delivery.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "server/round/fold.h"

namespace thalweg {

Delivery::Delivery(const JoinRequest& job, ShardMetrics& metrics, TraceWriter* trace,
                   Recipients& recipients)
    : job_(job.job),
      world_size_(job.world_size),
      shard_(job.shard),
      metrics_(metrics),
      stale_updates_(metrics.ByNode(&ShardMetrics::StaleUpdates, job.num_nodes)),
      trace_(trace, "shard", job.job, {{"num_nodes", job.num_nodes}}),
      recipients_(recipients) {}

absl::Status Delivery::Deliver(const Completed& completed) {
  const CompleteRound& round = completed.round;
  if (!round.answers.empty() && round.payloads.empty()) return GiveWeights(completed);
  if (completed.has_lost_residual) NoteLostResidual();
  const Recipients::Audience audience = recipients_.AudienceOf(round);
  Times times;
  times.begin = Now();
  THALWEG_ASSIGN_OR_RETURN(RoundResult mean,
                           FoldRound(round, audience.epoch, completed.state.get()));
  times.folded = Now();
  THALWEG_ASSIGN_OR_RETURN(AppliedUpdate applied, Apply(completed, std::move(mean)));
  RoundResult& result = applied.result;
  if (round.is_lone) result.workers = world_size_;  // nobody is missing
  const auto& rule = completed.update.rule;
  times.end = rule == nullptr ? times.folded : Now();
  // Sums stand for no gradient.
  const bool has_sums = rule != nullptr && result.wire == WireFormat::kFloat64;
  Count(result, has_sums ? 0 : completed.raw_bytes, audience.results.size(), times);
  for (const auto& node : audience.results) node->OnResult(result);
  if (!audience.receipts.empty()) {
    RoundResult receipt = result;
    receipt.payload = Payload();
    for (const auto& node : audience.receipts) node->OnResult(receipt);
  }
  for (const auto& [node, number] : round.answers) {
    Send({node, number}, applied, completed.raw_bytes);
  }
  if (applied.version != 0) AnswerAsks(completed, applied);
  if (trace_) Trace(completed, applied, times);
  return absl::OkStatus();
}

absl::StatusOr<AppliedUpdate> Delivery::Apply(const Completed& completed, RoundResult mean) const {
  const auto& [rule, pieces] = completed.update;
  if (rule == nullptr) return AppliedUpdate{.result = std::move(mean)};
  ChunkState& state = *completed.state;
  if (completed.step == nullptr) {
    AppliedUpdate kept;
    THALWEG_ASSIGN_OR_RETURN(kept.result, KeepMean(mean, *pieces, state));
    return kept;
  }
  if (!rule->alone) return UpdateWeights(mean, *rule, *pieces, *completed.step, state);
  const uint32_t node = completed.last_node;
  THALWEG_ASSIGN_OR_RETURN(AppliedUpdate applied,
                           UpdateAlone(node, mean, *rule, *pieces, *completed.step, state));
  CountStaleness(node, applied.staleness);
  return applied;
}

absl::Status Delivery::Answer(const Asked& asked) {
  THALWEG_ASSIGN_OR_RETURN(std::optional<AppliedUpdate> given,
                           AskForWeights(asked.ask, asked.contributed, *asked.rule, *asked.state));
  if (!given) return absl::OkStatus();
  if (asked.rule->ahead > 0) CountStaleness(asked.ask.node, asked.ask.round - given->version);
  Send(asked.ask, *std::move(given), asked.raw_bytes);
  return absl::OkStatus();
}

absl::Status Delivery::GiveWeights(const Completed& completed) {
  const CompleteRound& round = completed.round;
  RoundResult contributed;  // without values
  contributed.id = round.id;
  contributed.elems = round.elems;
  contributed.epoch = recipients_.AudienceOf(round).epoch;
  for (const auto& [node, number] : round.answers) {
    THALWEG_RETURN_IF_ERROR(Answer({{node, number, round.id.round},
                                    contributed,
                                    completed.update.rule,
                                    completed.state,
                                    completed.raw_bytes}));
  }
  return absl::OkStatus();
}

void Delivery::AnswerAsks(const Completed& completed, const AppliedUpdate& applied) {
  const UpdateRule& rule = *completed.update.rule;
  if (rule.ahead == 0 && rule.quorum == 0) return;
  for (const Versions::Ask& ask : TakeAnswered(applied.version, *completed.state)) {
    if (rule.ahead > 0) CountStaleness(ask.node, ask.round - applied.version);
    Send(ask, applied, completed.raw_bytes);
  }
}

void Delivery::Send(const Versions::Ask& ask, AppliedUpdate given, double raw_bytes) {
  const std::shared_ptr<ServedNode> node = recipients_.Find(ask.node);
  if (node == nullptr) return;
  RoundResult& weights = given.result;
  CountSent(static_cast<double>(weights.payload.SizeBytes()), raw_bytes);
  weights.id.round = ask.round;
  weights.workers = world_size_;
  node->OnResult(std::move(weights));
}

void Delivery::CountStaleness(uint32_t node, uint64_t staleness) const {
  stale_updates_[node]->Add(static_cast<double>(staleness));
  metrics_.CountStaleness(staleness);
}

void Delivery::Count(const RoundResult& result, double raw_bytes, size_t nodes,
                     const Times& times) {
  const double fold_seconds = ToSeconds(times.folded - times.begin);
  const auto count = static_cast<double>(nodes);
  const auto nonfinite = static_cast<double>(result.nonfinite_elems);
  metrics_.rounds.Add(absl::StatusCode::kOk);
  metrics_.nonfinite.Add(nonfinite);
  if (nonfinite > 0) metrics_.nonfinite_rounds.Add();
  metrics_.fold.Observe(fold_seconds);
  if (times.end > times.folded) {
    metrics_.update.Observe(ToSeconds(times.end - times.folded));
    update_seconds_.Add(ToSeconds(times.end - times.folded));
  }
  rounds_.Add();
  nonfinite_.Add(nonfinite);
  fold_seconds_.Add(fold_seconds);
  CountSent(count * static_cast<double>(result.payload.SizeBytes()), count * raw_bytes);
}

void Delivery::CountSent(double wire_bytes, double raw_bytes) {
  metrics_.bytes_out.Add(wire_bytes);
  metrics_.raw_bytes_out.Add(raw_bytes);
  wire_bytes_.Add(wire_bytes);
  raw_bytes_.Add(raw_bytes);
}

void Delivery::NoteLostResidual() {
  metrics_.lost_residuals.Add(1);
  if (has_lost_residuals_.exchange(true)) return;
  spdlog::warn(
      "job '{}': what the encoding of results had left out before this shard or a node was "
      "restarted is lost: the residuals of int8 and onebit begin at zero again",
      job_);
}

void Delivery::CountPassedOn(uint64_t bytes) {
  metrics_.bytes_in.Add(static_cast<double>(bytes));
  CountSent(static_cast<double>(bytes), 0);
}

void Delivery::Report(JobReport* report) const {
  report->rounds_completed = static_cast<uint64_t>(rounds_.Value());
  report->nonfinite_elems = static_cast<uint64_t>(nonfinite_.Value());
  report->fold_time = FromSeconds(fold_seconds_.Value());
  report->update_time = FromSeconds(update_seconds_.Value());
  report->sent = {raw_bytes_.Value(), wire_bytes_.Value()};
}

void Delivery::Trace(const Completed& completed, const AppliedUpdate& applied,
                     const Times& times) const {
  const RoundResult& result = applied.result;
  TraceSubject what;
  if (IsOneShot(result.id)) {
    what.collective = absl::StrCat("collective ", result.id.round, " of group ",
                                   result.id.bucket.generation, ", chunk ", result.id.chunk);
  }
  what.bucket = result.id.bucket;
  what.chunk = {result.id.chunk, result.id.round, shard_};
  what.raw_bytes = static_cast<uint64_t>(completed.raw_bytes);
  what.wire_bytes = result.payload.SizeBytes();
  what.codec = Name(result.wire);
  trace_.Work("fold", times.begin, times.folded, what);
  TraceSubject updated = what;
  const auto& rule = completed.update.rule;
  if (rule != nullptr && (rule->has_own_rounds() || rule->ahead > 0)) {
    updated.version = applied.version;
  }
  for (size_t i = 0; i < completed.round.rounds.size(); ++i) {
    absl::StrAppend(&updated.pushes, i == 0 ? "" : " ", completed.round.nodes[i], ":",
                    completed.round.rounds[i]);
  }
  what.last_node = completed.last_node;
  if (completed.round.is_lone) updated.last_node = what.last_node;
  if (times.end > times.folded) trace_.Work("update", times.folded, times.end, std::move(updated));
  trace_.Work("deliver", times.end, Now(), what);
  if (completed.round.is_lone) return;  // nobody waits
  const Duration open = std::max(Duration::zero(), completed.round.open);
  trace_.Wait("wait_for_slowest", completed.at - open, completed.at, std::move(what));
}

}  // namespace thalweg
