// This header counts elements by digits of their magnitudes, and finds where the largest of them
// end.
#pragma once

#include <cstdint>

#include "kernels/cast/element.h"
#include "kernels/codec/topk/tiles.h"
#include "kernels/codec/topk/topk_launch.h"
#include "kernels/launch/combine.h"

namespace thalweg {

struct CutShared {
  uint32_t warps[kTopKThreads / 32];
  uint32_t nonfinite;
  TopKCut cut;
};

// Returns where the `wanted` largest of the elements counted in `bins` end; no bin when none is
// wanted. With `kFirst`, `wanted` is first limited to the number of elements, and raised to the
// number of non-finite ones; `*limited` becomes that. All threads of the block must call it.
template <uint32_t kBins, bool kFirst, class Thread>
THALWEG_DEVICE inline TopKCut FindCut(const Thread& thread, CutShared& shared, const uint32_t* bins,
                                      uint32_t wanted, uint32_t* limited) {
  constexpr uint32_t kEach = kBins / kTopKThreads;
  // The first thread has the highest bins: for the first cut those of infinity and NaN.
  static_assert(kBins != kUpperBins || (Fp32::kInfinity >> 20) + kEach == kBins);
  uint32_t bin = kBins - kEach * thread.Index();
  uint32_t count = 0;
  for (uint32_t b = 1; b <= kEach; ++b) count += bins[bin - b];
  if (thread.Index() == 0) {
    shared.nonfinite = count;
    shared.cut = {kBins, 0};
  }
  const auto [above, all] = ScanBlock<kTopKThreads>(thread, shared.warps, count, SumOf());
  if constexpr (kFirst) {
    if (wanted < shared.nonfinite) wanted = shared.nonfinite;
    if (wanted > all) wanted = all;
    *limited = wanted;
  }
  if (above < wanted && wanted <= above + count) {
    uint32_t left = wanted - above;
    for (--bin; left > bins[bin]; --bin) left -= bins[bin];
    shared.cut = {bin, left};
  }
  thread.SyncBlock();
  return shared.cut;
}

// Adds the block's counts to the total counts.
template <uint32_t kBins, class Thread>
THALWEG_DEVICE inline void AddBins(const Thread& thread, const uint32_t* bins, uint32_t* all) {
  thread.SyncBlock();
  for (uint32_t bin = thread.Index(); bin < kBins; bin += kTopKThreads) {
    if (bins[bin] != 0) thread.Add(&all[bin], bins[bin]);
  }
}

template <uint32_t kBins, class Thread>
THALWEG_DEVICE inline void ClearBins(const Thread& thread, uint32_t* bins) {
  for (uint32_t bin = thread.Index(); bin < kBins; bin += kTopKThreads) bins[bin] = 0;
  thread.SyncBlock();
}

}  // namespace thalweg
