// This file holds the parts of Job for updates that let nodes be apart.
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "server/aggregator/job.h"

namespace thalweg {

absl::StatusOr<RoundEngine::Added> Job::AddLocked(uint32_t node, Contribution contribution,
                                                  const std::shared_ptr<const UpdateRule>& rule,
                                                  TimePoint now) {
  const ServedNode* sink = peers_[node].sink.get();
  const uint32_t backlog = sink == nullptr ? 0 : sink->Backlog();
  const bool is_apart =
      rule != nullptr && rule->has_own_rounds() && contribution.epoch == engine_.epoch();
  auto added = !is_apart ? engine_.Add(node, std::move(contribution), now, backlog,
                                       rule == nullptr ? 0 : rule->ahead)
               : rule->alone
                   ? lone_.Add(node, members_.all()[node].workers, std::move(contribution))
                   : AddToQuorumLocked(node, std::move(contribution), rule, now);
  if (added.ok()) return added;
  return absl::Status(added.status().code(),
                      absl::StrCat(members_.Name(node), ": ", added.status().message()));
}

absl::StatusOr<RoundEngine::Added> Job::AddToQuorumLocked(
    uint32_t node, Contribution contribution, const std::shared_ptr<const UpdateRule>& rule,
    TimePoint now) {
  THALWEG_ASSIGN_OR_RETURN(const std::shared_ptr<const UpdateStep> settings,
                           SettingsLocked(contribution.id, contribution.settings));
  THALWEG_RETURN_IF_ERROR(CheckFits(*settings, *rule));
  THALWEG_ASSIGN_OR_RETURN(
      RoundEngine::Added added,
      quorum_.Add({node, members_.all()[node].workers, engine_.window_of(node)},
                  std::move(contribution), rule, *settings, now));
  if (added.verdict == RoundEngine::Verdict::kStale) return added;
  CountStaleness(node, added.late.updates);
  if (added.late.updates > 0) late_[node]->Add();
  return added;
}

absl::StatusOr<Job::Asked> Job::AskedLocked(uint32_t node, const RoundResult& contributed,
                                            uint64_t least, std::shared_ptr<const UpdateRule> rule,
                                            double raw_bytes) const {
  const RoundId& id = contributed.id;
  auto state = chunks_.Find(id.bucket, id.chunk);
  if (state == nullptr) return NoWeights(id);
  return Asked{{node, id.round, least}, contributed, std::move(rule), std::move(state), raw_bytes};
}

absl::StatusOr<AppliedUpdate> Job::Update(const Completed& completed, const RoundResult& mean) {
  const auto& [rule, pieces] = completed.update;
  if (!rule->alone) {
    return UpdateWeights(mean, *rule, *pieces, *completed.step, *completed.state);
  }
  const uint32_t node = completed.last_node;
  THALWEG_ASSIGN_OR_RETURN(AppliedUpdate applied, UpdateAlone(node, mean, *rule, *pieces,
                                                              *completed.step, *completed.state));
  CountStaleness(node, applied.staleness);
  return applied;
}

absl::Status Job::Answer(const Asked& asked) {
  THALWEG_ASSIGN_OR_RETURN(std::optional<AppliedUpdate> given,
                           AskForWeights(asked.ask, asked.contributed, *asked.rule, *asked.state));
  if (!given) return absl::OkStatus();
  if (asked.rule->ahead > 0) CountStaleness(asked.ask.node, asked.ask.round - given->version);
  Send(asked.ask, *std::move(given), asked.raw_bytes);
  return absl::OkStatus();
}

absl::Status Job::GiveWeights(const Completed& completed) {
  const CompleteRound& round = completed.round;
  RoundResult contributed;  // without values
  contributed.id = round.id;
  contributed.elems = round.elems;
  {
    MutexLock lock(mutex_);
    contributed.epoch = members_.epoch();
  }
  for (const auto& [node, number] : round.answers) {
    THALWEG_RETURN_IF_ERROR(Answer({{node, number, round.id.round},
                                    contributed,
                                    completed.update.rule,
                                    completed.state,
                                    completed.raw_bytes}));
  }
  return absl::OkStatus();
}

void Job::AnswerAsks(const Completed& completed, const AppliedUpdate& applied) {
  const UpdateRule& rule = *completed.update.rule;
  if (rule.ahead == 0 && rule.quorum == 0) return;
  for (const Versions::Ask& ask : TakeAnswered(applied.version, *completed.state)) {
    if (rule.ahead > 0) CountStaleness(ask.node, ask.round - applied.version);
    Send(ask, applied, completed.raw_bytes);
  }
}

void Job::Send(const Versions::Ask& ask, AppliedUpdate given, double raw_bytes) {
  std::shared_ptr<ServedNode> sink;
  {
    MutexLock lock(mutex_);
    sink = peers_[ask.node].sink;
  }
  if (sink == nullptr) return;
  RoundResult& weights = given.result;
  CountSent(static_cast<double>(weights.payload.SizeBytes()), raw_bytes);
  weights.id.round = ask.round;
  weights.workers = spec_.world_size;
  sink->OnResult(std::move(weights));
}

void Job::CountStaleness(uint32_t node, uint64_t staleness) const {
  stale_updates_[node]->Add(static_cast<double>(staleness));
  metrics_.CountStaleness(staleness);
}

}  // namespace thalweg
