// From a complete round to its result.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/statusor.h"
#include "core/base/exchange.h"
#include "server/round/round_engine.h"

namespace thalweg {

// Folds the round's payloads, in node order and in one pass, into the mean over all workers,
// encoded once. `workers[node]` is how many workers that node stands for. Pure and thread-safe:
// runs outside any lock.
absl::StatusOr<RoundResult> Fold(const RoundEngine::CompleteRound& round,
                                 std::span<const uint32_t> workers, uint64_t epoch);

}  // namespace thalweg
