// LoneRounds makes each contribution of nodes that do not wait for each other a round of its own.
#pragma once

#include <cstdint>
#include <map>
#include <tuple>

#include "absl/status/statusor.h"
#include "core/exchange/rounds.h"
#include "server/round/round_engine.h"

namespace thalweg {

// LoneRounds is thread-compatible. Rounds of a chunk are numbered for each node by itself.
class LoneRounds {
 public:
  // Takes a contribution of a node with so many workers, whose payload has been checked against its
  // bucket's layout: it is complete at once, or has come before. FailedPrecondition: it is not the
  // node's next one to that chunk. InvalidArgument: it is of a group, or of other nodes' values.
  absl::StatusOr<RoundEngine::Added> Add(uint32_t node, uint32_t workers,
                                         Contribution contribution);
  // Returns whether the node's contribution to this round has come before.
  bool Has(uint32_t node, const RoundId& id) const;
  // Forgets the rounds of earlier layouts of bucket `id.index`.
  void DropOlderLayouts(BucketId id);

 private:
  // By chunk and node: its last round.
  std::map<std::tuple<BucketId, uint32_t, uint32_t>, uint64_t> completed_;
};

}  // namespace thalweg
