// This header divides a granule of a tensor among threads, four elements at a time.
#pragma once

#include <cstdint>

#include "kernels/launch/host_device.h"
#include "kernels/optim/optim_launch.h"

namespace thalweg {

inline constexpr uint32_t kQuad = 4;

// An ElementPlace says which elements of a tensor: when packed, four from `first` on, at a multiple
// of their bytes in every array; else `count` elements at a distance of `stride`. Four elements of
// 32 bits are the widest access of a thread, so that what a warp writes at a time is adjacent.
struct ElementPlace {
  uint64_t first;
  uint32_t stride;
  uint32_t count;

  THALWEG_DEVICE uint64_t At(uint32_t e) const { return first + uint64_t{stride} * e; }
};

// Calls visit.operator()<kPacked>(place) for those elements of a granule that thread `index` of
// `threads` has. Packs begin with its element `head`.
template <class Visit>
THALWEG_DEVICE inline void ForEachPlace(uint32_t index, uint32_t threads, uint8_t head,
                                        const Granule& granule, const Visit& visit) {
  const uint32_t elems = granule.count;
  const uint32_t packs = head == kNoPacks || elems < head ? 0 : (elems - head) / kQuad;
  for (uint32_t pack = index; pack < packs; pack += threads) {
    visit.template operator()<true>(ElementPlace{granule.first + head + pack * kQuad, 1, kQuad});
  }
  // Where there are packs, fewer than 16 elements are left before and behind them.
  const uint32_t singles = elems - packs * kQuad;
  for (uint32_t single = index; single < singles; single += threads * kQuad) {
    const uint32_t left = (singles - single + threads - 1) / threads;
    visit.template operator()<false>(
        ElementPlace{granule.first + single + (single < head ? 0 : packs * kQuad), threads,
                     left < kQuad ? left : kQuad});
  }
}

}  // namespace thalweg
