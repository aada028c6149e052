// With what weights the contributions of nodes of different size are folded.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"

namespace thalweg {

// What FoldMean multiplies with and divides by.
struct Weighting {
  std::vector<float> weights;
  float divisor = 0;
};

// The weighting that makes the mean over all workers out of `contributions` ≥ 1 means, of which the
// k-th stands for `workers[k]` workers. Weights are first divided by their greatest common divisor.
// InvalidArgument when there are not as many counts as contributions or a count is 0. Thread-safe.
absl::StatusOr<Weighting> WeightingOf(size_t contributions, std::span<const uint32_t> workers);

}  // namespace thalweg
