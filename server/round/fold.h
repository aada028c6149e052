// From a complete round to its result.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/statusor.h"
#include "core/base/exchange.h"
#include "server/round/residual_store.h"
#include "server/round/round_engine.h"

namespace thalweg {

// Folds the round's payloads, in node order and in one pass, into the mean over all workers,
// encoded once. `workers[node]` is how many workers that node stands for. `residual`, the chunk's,
// is what the encoding adds and where it puts what it leaves out; null unless
// HasResidual(round.wire).
//
// Pure but for the residual, and thread-safe: runs outside any lock but the residual's. Rounds of
// one chunk must be folded in their order for the residual to mean anything.
// InvalidArgument, with nothing changed, says what is wrong with which contribution; their numbers
// are those of the nodes.
absl::StatusOr<RoundResult> Fold(const RoundEngine::CompleteRound& round,
                                 std::span<const uint32_t> workers, uint64_t epoch,
                                 Residual* residual);

}  // namespace thalweg
