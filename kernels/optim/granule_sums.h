// Sums over granules on a GPU, in float64 and in orders that do not depend on the number of blocks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/host_device.h"

namespace thalweg {

// A granule's squares are added up in sixteen sums, each of every sixteenth element, as kernels on
// processors do.
inline constexpr uint32_t kChains = 16;

// The total of sixteen chains that 16 neighbouring lanes of a warp have, from the first to the
// last. All lanes of the warp must call it.
template <class Thread>
THALWEG_DEVICE inline double TotalOfChains(const Thread& thread, double chain) {
  const uint32_t first = thread.Lane() / kChains * kChains;
  double total = 0;
  for (uint32_t k = 0; k < kChains; ++k) total += thread.Shuffle(chain, first + k);
  return total;
}

// Adds up `count` sums of granules: thread k every kThreads-th from number k on, and what the
// threads have from the first to the last. So up to kThreads sums are added in their own order. All
// threads of a block must call it, which share `parts`; the first of them gets the result.
template <int kThreads, class Thread>
THALWEG_DEVICE inline double TotalOfGranules(const Thread& thread, const double* sums,
                                             uint64_t count, double* parts) {
  constexpr uint32_t kAtOnce = 16;  // reads under way
  double part = 0;
  for (uint64_t begin = thread.Index(); begin < count; begin += uint64_t{kThreads} * kAtOnce) {
    double read[kAtOnce];
    for (uint32_t k = 0; k < kAtOnce; ++k) {
      const uint64_t i = begin + uint64_t{k} * kThreads;
      read[k] = i < count ? sums[i] : 0.0;
    }
    for (uint32_t k = 0; k < kAtOnce; ++k) part += read[k];
  }
  parts[thread.Index()] = part;
  thread.SyncBlock();
  double total = 0;
  if (thread.Index() == 0) {
    for (uint32_t k = 0; k < kThreads && k < count; ++k) total += parts[k];
  }
  thread.SyncBlock();
  return total;
}

}  // namespace thalweg
