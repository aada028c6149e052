// This header defines how the kernels of topk walk over a chunk: in tiles, of which a warp takes
// one at a time.
#pragma once

#include <cstdint>

#include "kernels/codec/topk/topk_launch.h"
#include "kernels/launch/launch.h"

namespace thalweg {

inline constexpr uint32_t kTopKThreads = 256;
inline constexpr uint32_t kTilesAtOnce = kTopKThreads / 32;

// A warp reads this many rows of 32 elements at once.
inline constexpr uint32_t kRowsAtOnce = 8;
inline constexpr uint32_t kRowsOfTile = kTopKTileElems / 32;

THALWEG_HD constexpr uint64_t TilesOf(uint64_t elems) { return BlocksFor(elems, kTopKTileElems); }

// Calls visit(tile) for the tiles of this warp, with all its lanes.
template <class Thread, class Visit>
THALWEG_DEVICE inline void WalkTiles(const Thread& thread, const TopKWork& work,
                                     const Visit& visit) {
  const uint64_t tiles = TilesOf(work.elems);
  const uint64_t step = uint64_t{thread.Blocks()} * kTilesAtOnce;
  for (uint64_t tile = thread.Block() * kTilesAtOnce + thread.Warp(); tile < tiles; tile += step) {
    visit(tile);
  }
}

template <class Thread>
THALWEG_DEVICE inline uint32_t LanesBelow(const Thread& thread) {
  return (1u << thread.Lane()) - 1;
}

// Returns the number of bits that are 1.
THALWEG_DEVICE inline uint32_t CountBits(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return static_cast<uint32_t>(__popc(bits));
#else
  return static_cast<uint32_t>(__builtin_popcount(bits));
#endif
}

// Returns the position of the highest bit that is 1. Requires that there is one.
THALWEG_DEVICE inline uint32_t HighestBit(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return 31u - static_cast<uint32_t>(__clz(static_cast<int>(bits)));
#else
  return 31u - static_cast<uint32_t>(__builtin_clz(bits));
#endif
}

// Calls visit(x, i, there) for the elements of a tile, in rows of 32, with all lanes of the warp;
// `there` is false beyond the last element, where x is 0.
template <bool kFeedback, class Thread, class Visit>
THALWEG_DEVICE inline void VisitTile(const Thread& thread, const TopKWork& work, uint64_t tile,
                                     const Visit& visit) {
  for (uint32_t row = 0; row < kRowsOfTile; row += kRowsAtOnce) {
    float x[kRowsAtOnce];
    const uint64_t first = tile * kTopKTileElems + row * 32 + thread.Lane();
    for (uint32_t r = 0; r < kRowsAtOnce; ++r) {
      const uint64_t i = first + 32 * r;
      x[r] = 0;
      if (i < work.elems) x[r] = kFeedback ? work.values[i] + work.residual[i] : work.values[i];
    }
    for (uint32_t r = 0; r < kRowsAtOnce; ++r) {
      visit(x[r], first + 32 * r, first + 32 * r < work.elems);
    }
  }
}

// Calls visit(bits, offset, there) for the candidates of a tile, 32 at a time, with all lanes.
template <class Thread, class Visit>
THALWEG_DEVICE inline void VisitCandidates(const Thread& thread, const TopKWork& work,
                                           uint64_t tile, const Visit& visit) {
  const uint64_t begin = tile * kTopKTileElems;
  const uint32_t candidates = work.tiles[tile].candidates;
  for (uint32_t first = 0; first < candidates; first += 32) {
    const uint32_t c = first + thread.Lane();
    const bool there = c < candidates;
    visit(there ? work.bits[begin + c] : 0, there ? uint32_t{work.offsets[begin + c]} : 0, there);
  }
}

}  // namespace thalweg
