// FoldRound turns a complete round into its result.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "core/exchange/rounds.h"
#include "server/round/chunk_states.h"
#include "server/round/complete_round.h"

namespace thalweg {

// Gives the round the result that its collective says, in node order and in one pass: the mean over
// all workers whose contributions it has, encoded once, or another fold in a dense format, or
// without a fold the payload itself. `state` belongs to the chunk: where HasResidual(round.wire),
// the encoding of a mean adds its residual, in units of round.loss_scale, and stores there what it
// leaves out; otherwise it may be null.
//
// FoldRound changes nothing but the residual and is thread-safe. It needs no lock but the
// state's. Rounds of one chunk must be folded in order for the residual to be meaningful. On
// InvalidArgument nothing has changed; the message says what is wrong with which contribution,
// numbered by its place in the round.
absl::StatusOr<RoundResult> FoldRound(const CompleteRound& round, uint64_t epoch,
                                      ChunkState* state);

}  // namespace thalweg
