// Weights are what shards keep of a bucket with an update.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace thalweg {

// Weights are a chunk's parameters and its optimizer's state, in fp32, with one element for each of
// the chunk.
struct Weights {
  static constexpr size_t kMaxMoments = 2;

  bool operator==(const Weights&) const = default;

  std::vector<float> params;  // empty: they have not been written yet
  // As many as the optimizer has, in the order of kernels/optim; an empty one is the same as zeros.
  std::array<std::vector<float>, kMaxMoments> moments = {};
  uint64_t steps = 0;  // done so far
};

// Weights are read and written in slices: 0 is the parameters, 1 and 2 are the moments.
struct WeightsSlice {
  std::vector<float> values;
  uint64_t steps = 0;  // done so far

  bool operator==(const WeightsSlice&) const = default;
};

}  // namespace thalweg
