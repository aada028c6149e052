// This header divides a range of a tensor among threads, four elements at a time.
#pragma once

#include <cstdint>

#include "kernels/launch/host_device.h"
#include "kernels/optim/optim_launch.h"

namespace thalweg {

inline constexpr uint32_t kQuad = 4;

// A ElementPlace says which elements: when packed, four from `first` on, at a multiple of their
// bytes in every array; else `count` elements at a distance of `stride`. Four elements of 32 bits
// are the widest access of a thread, so that what a warp writes at a time is adjacent.
struct ElementPlace {
  uint64_t first;
  uint32_t stride;
  uint32_t count;

  THALWEG_DEVICE uint64_t At(uint32_t e) const { return first + uint64_t{stride} * e; }
};

// Calls use.operator()<kPacked>(place, load.operator()<kPacked>(place)) for the elements in
// [first, last) of thread `index` of `threads`; `first` is a multiple of kQuad. With kAhead, what
// `load` reads of a place is in flight while the place before it is used, and must not be what
// `use` writes there; this takes registers for both.
template <bool kAhead, class Load, class Use>
THALWEG_DEVICE inline void ForEachPlace(uint32_t index, uint32_t threads, uint8_t head,
                                        uint64_t first, uint64_t last, const Load& load,
                                        const Use& use) {
  const uint64_t elems = last - first;
  const uint64_t packs = head == kNoPacks || elems < head ? 0 : (elems - head) / kQuad;
  const auto at = [&](uint64_t pack) {
    return ElementPlace{first + head + pack * kQuad, 1, kQuad};
  };
  if constexpr (kAhead) {
    if (index < packs) {
      auto next = load.template operator()<true>(at(index));
      for (uint64_t pack = index; pack < packs; pack += threads) {
        const auto loaded = next;
        if (pack + threads < packs) next = load.template operator()<true>(at(pack + threads));
        use.template operator()<true>(at(pack), loaded);
      }
    }
  } else {
    for (uint64_t pack = index; pack < packs; pack += threads) {
      use.template operator()<true>(at(pack), load.template operator()<true>(at(pack)));
    }
  }
  // Where there are packs, fewer than 16 elements are left before and behind them.
  const uint64_t singles = elems - packs * kQuad;
  for (uint64_t single = index; single < singles; single += uint64_t{threads} * kQuad) {
    const uint64_t left = (singles - single + threads - 1) / threads;
    const ElementPlace place{first + single + (single < head ? 0 : packs * kQuad), threads,
                             static_cast<uint32_t>(left < kQuad ? left : kQuad)};
    use.template operator()<false>(place, load.template operator()<false>(place));
  }
}

}  // namespace thalweg
