// FoldRound turns a complete round into its result.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "core/exchange/rounds.h"
#include "server/round/complete_round.h"
#include "server/round/residual_store.h"

namespace thalweg {

// Gives the round the result that its collective says, in node order and in one pass: the mean over
// all workers whose contributions it has, encoded once, or another fold in a dense format, or
// without a fold the payload itself. `residual` belongs to the chunk: the encoding of a mean adds
// it, in units of round.loss_scale, and stores there what it leaves out. It is null unless
// HasResidual(round.wire).
//
// FoldRound changes nothing but the residual and is thread-safe. It needs no lock but the
// residual's. Rounds of one chunk must be folded in order for the residual to be meaningful. On
// InvalidArgument nothing has changed; the message says what is wrong with which contribution,
// numbered by its place in the round.
absl::StatusOr<RoundResult> FoldRound(const CompleteRound& round, uint64_t epoch,
                                      Residual* residual);

}  // namespace thalweg
