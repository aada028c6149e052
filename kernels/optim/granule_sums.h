// This header sums over granules, in float64 and in orders that depend only on their number.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/cast/element.h"
#include "kernels/launch/host_device.h"

namespace thalweg {

// A granule's squares are added up in sixteen sums, each of every sixteenth element, as kernels on
// processors do.
inline constexpr uint32_t kChains = 16;

// Adds the square of a float32, of which float64 has every bit: one rounding, as of product and
// sum.
THALWEG_DEVICE inline double AddSquare(float value, double sum) {
  const double wide = value;
  return Fma(wide, wide, sum);
}

// Returns the total of sixteen chains that 16 neighbouring lanes of a warp have, from the first to
// the last. All lanes of the warp must call it.
template <class Thread>
THALWEG_DEVICE inline double TotalOfChains(const Thread& thread, double chain) {
  const uint32_t first = thread.Lane() / kChains * kChains;
  double total = 0;
  for (uint32_t k = 0; k < kChains; ++k) total += thread.Shuffle(chain, first + k);
  return total;
}

// The sums of granules are added up in this many parts, each of every 256th, and the parts from the
// first to the last.
inline constexpr uint32_t kParts = 256;

inline double TotalOfGranules(std::span<const double> sums) {
  double total = 0;
  for (size_t k = 0; k < kParts && k < sums.size(); ++k) {
    double part = 0;
    for (size_t i = k; i < sums.size(); i += kParts) part += sums[i];
    total += part;
  }
  return total;
}

// Does the same with kParts threads of a block, of which this is number `index` and which share
// `parts`. All threads of the block must call it, with sums of their own if there are more; number
// 0 gets the result.
template <class Thread>
THALWEG_DEVICE inline double TotalOfGranules(const Thread& thread, uint32_t index,
                                             const double* sums, uint64_t count, double* parts) {
  constexpr uint32_t kAtOnce = 32;  // reads in flight
  double part = 0;
  for (uint64_t begin = index; begin < count; begin += uint64_t{kParts} * kAtOnce) {
    double read[kAtOnce];
    for (uint32_t k = 0; k < kAtOnce; ++k) {
      const uint64_t i = begin + uint64_t{k} * kParts;
      read[k] = i < count ? sums[i] : 0.0;
    }
    for (uint32_t k = 0; k < kAtOnce; ++k) part += read[k];
  }
  parts[index] = part;
  thread.SyncBlock();
  double total = 0;
  if (index == 0) {
    for (uint32_t begin = 0; begin < kParts && begin < count; begin += kAtOnce) {
      double read[kAtOnce];
      for (uint32_t k = 0; k < kAtOnce; ++k) read[k] = begin + k < count ? parts[begin + k] : 0.0;
      for (uint32_t k = 0; k < kAtOnce; ++k) total += read[k];
    }
  }
  return total;
}

}  // namespace thalweg
