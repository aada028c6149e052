// This file holds the parts of Job for updates that let nodes be apart.
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "server/aggregator/job.h"

namespace thalweg {

absl::StatusOr<RoundEngine::Added> Job::AddLocked(uint32_t node, Contribution contribution,
                                                  const UpdateRule* rule, TimePoint now) {
  const ServedNode* sink = peers_[node].sink.get();
  const uint32_t backlog = sink == nullptr ? 0 : sink->Backlog();
  const bool is_lone = rule != nullptr && rule->alone && contribution.epoch == members_.epoch();
  auto added = is_lone ? lone_.Add(node, members_.all()[node].workers, std::move(contribution))
                       : engine_.Add(node, std::move(contribution), now, backlog,
                                     rule == nullptr ? 0 : rule->ahead);
  if (added.ok()) return added;
  return absl::Status(added.status().code(),
                      absl::StrCat(members_.Name(node), ": ", added.status().message()));
}

absl::StatusOr<Job::Asked> Job::AskedLocked(uint32_t node, const RoundResult& contributed,
                                            std::shared_ptr<const UpdateRule> rule,
                                            double raw_bytes) const {
  const RoundId& id = contributed.id;
  const uint64_t least = id.round - std::min<uint64_t>(id.round, rule->ahead);
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
  if (given) Send(asked.ask, *std::move(given), asked.raw_bytes);
  return absl::OkStatus();
}

void Job::AnswerAsks(const Completed& completed, const AppliedUpdate& applied) {
  if (completed.update.rule->ahead == 0) return;
  for (const Versions::Ask& ask : TakeAnswered(applied.version, *completed.state)) {
    Send(ask, applied, completed.raw_bytes);
  }
}

void Job::Send(const Versions::Ask& ask, AppliedUpdate given, double raw_bytes) {
  CountStaleness(ask.node, ask.round - given.version);
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
