// UpdateWeights turns the mean of a chunk's gradients into the chunk's new weights.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "core/base/layout.h"
#include "core/base/update.h"
#include "core/exchange/rounds.h"
#include "server/round/chunk_states.h"

namespace thalweg {

// An UpdatePiece is elements of a chunk, counted from its begin, that belong to one tensor.
struct UpdatePiece {
  ElemRange elems;
  uint32_t group = 0;

  bool operator==(const UpdatePiece&) const = default;
};

// Returns the pieces of each chunk of a bucket. Requires Validate(rule, layout), and that `plan` is
// of all its elements.
std::vector<std::vector<UpdatePiece>> PiecesOf(const BucketLayout& layout, const UpdateRule& rule,
                                               const ChunkPlan& plan);

// Keeps `mean`, a result of FoldRound, in `state` for the pull that follows. Returns the result
// that takes its place: the sums of its squares in float64, by granule of the chunk. Takes the
// state's lock.
absl::StatusOr<RoundResult> KeepMean(const RoundResult& mean, std::span<const UpdatePiece> pieces,
                                     ChunkState& state);

// An AppliedUpdate is an update with its place among those of the chunk.
struct AppliedUpdate {
  RoundResult result;
  uint64_t version = 0;    // of the weights in the result
  uint64_t staleness = 0;  // of UpdateAlone: updates since those that the gradient knew of
};

// Does one step of rule.optimizer on the weights in `state` with the gradients that `mean`, a
// result of FoldRound, has for workers, or, where the rule commits, with what KeepMean has kept.
// The result that it returns has their new values in the place of `mean`, in rule.down. In the
// arithmetic of kernels/optim: the weights are those that a worker's own fused optimizer computes
// from the same mean, bit for bit, however the bucket is cut into chunks. With a step that measures
// it only advances LAMB's moments; the result then has, by granule of the chunk and in float64, the
// sums of the squares of the weights, followed by those of the update. It takes the state's lock.
// FailedPrecondition: the weights have not been written, or no mean has been kept or measured.
absl::StatusOr<AppliedUpdate> UpdateWeights(const RoundResult& mean, const UpdateRule& rule,
                                            std::span<const UpdatePiece> pieces,
                                            const UpdateStep& step, ChunkState& state);

// Does the same with what one node has contributed by itself, where the rule is `alone`.
absl::StatusOr<AppliedUpdate> UpdateAlone(uint32_t node, const RoundResult& mean,
                                          const UpdateRule& rule,
                                          std::span<const UpdatePiece> pieces,
                                          const UpdateStep& step, ChunkState& state);

// Where the rule lets nodes be `ahead`: returns the weights of the moment as the result that `ask`
// waits for, with their version, or keeps `ask` for TakeAnswered if they are too old. `contributed`
// names the chunk's round and size.
absl::StatusOr<std::optional<AppliedUpdate>> AskForWeights(const Versions::Ask& ask,
                                                           const RoundResult& contributed,
                                                           const UpdateRule& rule,
                                                           ChunkState& state);
// Returns the asks that weights of this version answer, and forgets them.
std::vector<Versions::Ask> TakeAnswered(uint64_t version, ChunkState& state);

}  // namespace thalweg
