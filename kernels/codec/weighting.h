// This header computes the weights for folding contributions of nodes of different size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"

namespace thalweg {

// FoldMean multiplies by the weights and divides by the divisor.
struct Weighting {
  std::vector<float> weights;
  float divisor = 0;
};

// Returns the weighting that gives the mean over all workers from `contributions` ≥ 1 means, where
// the k-th is over `workers[k]` workers. Weights are first divided by their greatest common
// divisor. Returns InvalidArgument when there are not as many counts as contributions or a count is
// 0. Thread-safe.
absl::StatusOr<Weighting> WeightingOf(size_t contributions, std::span<const uint32_t> workers);

}  // namespace thalweg
