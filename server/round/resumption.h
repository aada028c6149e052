// Resumption finds out where a job goes on whose shard has been restarted: it gathers how far the
// nodes have come, and passes on the results that only some of them have.
//
// A node contributes to a round when it has the result of the round before, and a round completes
// with the last node's contribution. So of each chunk, all nodes have the result of the same round
// r, or some have that of r and the others that of r - 1. Round r is then complete. Its result must
// not be computed again: a lossy format's would differ, because the shard's residuals are gone. The
// lowest node that has it supplies it, and those that lack it get it when they repeat their
// contribution to it.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/exchange/rounds.h"

namespace thalweg {

// A Resumption is thread-compatible. One without rounds wants nothing.
class Resumption {
 public:
  // Adds the last completed rounds of `node`, which must not have been added. InvalidArgument: they
  // are more than kMaxResumedChunks, or name a chunk twice or a part that cannot be.
  absl::Status Add(uint32_t node, const std::vector<BucketRounds>& completed);
  // Call once, when all nodes have been added. Returns the last complete round of each chunk of the
  // latest layouts. DataLoss: two nodes are more than one round apart, which is named, so that the
  // shard has kept weights. A node that has been restarted knows of whole buckets alone, and may
  // lack all results of those that were under way.
  absl::StatusOr<std::vector<RoundId>> Settle(uint32_t num_nodes);

  // Both after Settle: what `node` must supply; and how many results are still wanted or not yet
  // passed on to all that lack them.
  std::vector<BucketRounds> WantedFrom(uint32_t node) const;
  size_t num_missing() const { return missing_.size(); }

  // `node` has contributed to round `id`. Returns false if that has nothing to do with the
  // resumption. Otherwise the contribution counts for nothing else, and `result` is set if the node
  // gets the result now; if not, it gets it from Supply.
  bool Ask(uint32_t node, const RoundId& id, std::optional<RoundResult>* result);
  // Takes a result and returns the nodes that have asked for it. FailedPrecondition: it is not
  // wanted from `node`.
  absl::StatusOr<std::vector<uint32_t>> Supply(uint32_t node, const RoundResult& result);
  // After Settle: the job is to go on without `node`. FailedPrecondition: others lack a result that
  // it was to supply, which is named.
  absl::Status CheckMayLose(uint32_t node) const;

  // Returns about how much memory the rounds take, here and in a RoundEngine, without the payloads
  // of results.
  uint64_t bytes() const;

 private:
  using ChunkKey = std::pair<BucketId, uint32_t>;
  // Rounds is what the nodes have of one chunk.
  struct Rounds {
    void Add(uint32_t node, uint64_t round);

    uint64_t last = 0;     // the latest that any node has
    uint32_t holder = 0;   // the lowest node that has it
    uint32_t holders = 0;  // how many have it
    uint64_t least = 0;    // the earliest that a node has, among those that have any
    uint32_t least_node = 0;
    uint32_t nodes = 0;  // that have any
  };
  // A Missing result is one that some nodes lack.
  struct Missing {
    uint64_t round = 0;
    uint32_t holder = 0;
    uint32_t lacking = 0;  // how many nodes lack it
    std::vector<uint32_t> asked = {};
    std::optional<RoundResult> result = std::nullopt;
  };

  static absl::Status CheckApart(const ChunkKey& chunk, const Rounds& rounds, uint32_t num_nodes);

  std::map<BucketId, std::vector<Rounds>> gathered_;  // by chunk; until Settle
  size_t num_gathered_ = 0;                           // chunks
  size_t numbers_ = 0;                                // that waiting nodes have sent, until Settle
  size_t num_settled_ = 0;
  std::map<ChunkKey, Missing> missing_;
};

}  // namespace thalweg
