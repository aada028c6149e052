// This header has the arithmetic of orthogonalising for processors and GPUs, so that both get the
// same bits.
#pragma once

#include <cfloat>
#include <cstdint>

#include "kernels/launch/host_device.h"

namespace thalweg {

// A product of vectors has this many interleaved sums, element i in sum i mod 8, so that the order
// is the same for any number of lanes or threads. They are added as ((0 + 4) + (2 + 6)) + ((1 + 5)
// + (3 + 7)).
inline constexpr uint32_t kDotSums = 8;

// A remainder of a column below this fraction of its norm is only rounding: of its float32
// elements, up to 2^-24 of each, and of the previous columns.
inline constexpr double kNegligiblePart = 0x1p-22;

// Returns whether a column of norm `before` still has a direction when `after` is left. It has none
// when either is NaN or infinite.
THALWEG_HD inline bool HasDirection(double before, double after) {
  return after > kNegligiblePart * before && after <= DBL_MAX;
}

// Returns the length of a column whose norm after projection is `norm`.
THALWEG_HD inline double LengthAfter(double norm, double epsilon) {
  return norm > 0 ? norm / (norm + epsilon) : 0.0;
}

}  // namespace thalweg
