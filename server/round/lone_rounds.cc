#include "server/round/lone_rounds.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace thalweg {

absl::StatusOr<RoundEngine::Added> LoneRounds::Add(uint32_t node, uint32_t workers,
                                                   Contribution c) {
  if (c.group != 0 || c.collective != Collective()) {
    return absl::InvalidArgumentError(absl::StrCat(ToString(c.id), ": node ", node,
                                                   " updates alone, and contributes to '",
                                                   ToString(c.collective), "' in group ", c.group));
  }
  uint64_t& completed = completed_[{c.id.bucket, c.id.chunk, node}];
  if (c.id.round <= completed) return RoundEngine::Added{RoundEngine::Verdict::kStale, {}};
  if (c.id.round != completed + 1) {
    return absl::FailedPreconditionError(absl::StrCat(
        ToString(c.id), ": node ", node, " contributes to it after round ", completed));
  }
  completed = c.id.round;
  CompleteRound round{c.id, c.wire, c.elems, {}};
  round.payloads.push_back(std::move(c.payload));
  round.loss_scale = c.loss_scale;
  round.settings = c.settings;
  round.nodes = {node};
  round.workers = {workers};
  round.results = {node};
  round.is_lone = true;
  return RoundEngine::Added{RoundEngine::Verdict::kCompleted, std::move(round)};
}

bool LoneRounds::Has(uint32_t node, const RoundId& id) const {
  const auto last = completed_.find({id.bucket, id.chunk, node});
  return last != completed_.end() && id.round <= last->second;
}

void LoneRounds::DropOlderLayouts(BucketId id) {
  completed_.erase(completed_.lower_bound({BucketId{id.index, 0, 0}, 0, 0}),
                   completed_.lower_bound({BucketId{id.index, id.generation, 0}, 0, 0}));
}

}  // namespace thalweg
