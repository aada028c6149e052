// Fold turns a complete round into its result.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/statusor.h"
#include "core/exchange/rounds.h"
#include "server/round/residual_store.h"
#include "server/round/round_engine.h"

namespace thalweg {

// Folds the round's payloads, in node order and in one pass, into the mean over all workers and
// encodes it once. `workers[node]` is the number of that node's workers. `residual` belongs to the
// chunk: the encoding adds it, in units of round.loss_scale, and stores there what it leaves out.
// It is null unless HasResidual(round.wire).
//
// Fold changes nothing but the residual and is thread-safe. It needs no lock but the residual's.
// Rounds of one chunk must be folded in order for the residual to be meaningful. On InvalidArgument
// nothing has changed; the message says what is wrong with which contribution, numbered by node.
absl::StatusOr<RoundResult> Fold(const RoundEngine::CompleteRound& round,
                                 std::span<const uint32_t> workers, uint64_t epoch,
                                 Residual* residual);

}  // namespace thalweg
