// What orthogonalising is for processors and GPUs alike, so that both get the same bits.
#pragma once

#include <cfloat>
#include <cstdint>

#include "kernels/host_device.h"

namespace thalweg {

// A product of vectors is kept as this many interleaved sums, element i in sum i mod 8, so that the
// order is the same for any number of lanes or threads. They are added as
// ((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7)).
inline constexpr uint32_t kDotSums = 8;

// What is left of a column below this part of its norm is the rounding of its float32 elements, up
// to 2^-24 of each, and that of the columns before it.
inline constexpr double kNegligiblePart = 0x1p-22;

// Whether a column of norm `before` still has a direction when `after` is left. Not when either is
// NaN or infinite.
THALWEG_HD inline bool HasDirection(double before, double after) {
  return after > kNegligiblePart * before && after <= DBL_MAX;
}

// The length of a column whose norm after projection is `norm`.
THALWEG_HD inline double LengthAfter(double norm, double epsilon) {
  return norm > 0 ? norm / (norm + epsilon) : 0.0;
}

}  // namespace thalweg
