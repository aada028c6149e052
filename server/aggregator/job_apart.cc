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
  delivery_.CountStaleness(node, added.late.updates);
  if (added.late.updates > 0) late_[node]->Add();
  return added;
}

absl::StatusOr<Asked> Job::AskedLocked(uint32_t node, const RoundResult& contributed,
                                       uint64_t least, std::shared_ptr<const UpdateRule> rule,
                                       double raw_bytes) const {
  const RoundId& id = contributed.id;
  auto state = chunks_.Find(id.bucket, id.chunk);
  if (state == nullptr) return NoWeights(id);
  return Asked{{node, id.round, least}, contributed, std::move(rule), std::move(state), raw_bytes};
}

}  // namespace thalweg
