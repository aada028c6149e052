// The kernels of topk that find which elements are chosen: a radix select over magnitudes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cast/element.h"
#include "kernels/codec/topk_launch.h"
#include "kernels/codec/topk_scalar.h"
#include "kernels/cuda/block_scan.h"
#include "kernels/cuda/launch.h"

namespace thalweg {

inline constexpr uint32_t kTopKThreads = 256;
inline constexpr uint32_t kTilesAtOnce = kTopKThreads / 32;

// Rows of 32 elements that a warp reads at once.
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

// Number of bits that are 1.
THALWEG_DEVICE inline uint32_t CountBits(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return static_cast<uint32_t>(__popc(bits));
#else
  return static_cast<uint32_t>(__builtin_popcount(bits));
#endif
}

// Position of the highest bit that is 1. Requires that there is one.
THALWEG_DEVICE inline uint32_t HighestBit(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return 31u - static_cast<uint32_t>(__clz(static_cast<int>(bits)));
#else
  return 31u - static_cast<uint32_t>(__builtin_clz(bits));
#endif
}

struct CutShared {
  uint32_t warps[kTopKThreads / 32];
  uint32_t nonfinite;
  TopKCut cut;
};

// Where the `wanted` largest of the elements counted in `bins` end; no bin when none is wanted.
// With `kFirst`, `wanted` is first limited to the elements there are, and raised to those that are
// not finite; `*limited` becomes that. All threads of the block must call it.
template <uint32_t kBins, bool kFirst, class Thread>
THALWEG_DEVICE inline TopKCut FindCut(const Thread& thread, CutShared& shared, const uint32_t* bins,
                                      uint32_t wanted, uint32_t* limited) {
  constexpr uint32_t kEach = kBins / kTopKThreads;
  // The first thread has the highest bins: of the first cut those of infinity and NaN.
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

// Adds the block's counts to those of all.
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

// Counts all elements by their upper bits.
template <bool kFeedback>
struct CountUpperKernel {
  static constexpr uint32_t kThreads = kTopKThreads;
  struct Shared {
    uint32_t bins[kUpperBins];
  };
  using Args = TopKWork;

  template <class Thread>
  THALWEG_DEVICE static void Run(const Thread& thread, Shared& shared, const Args& work) {
    ClearBins<kUpperBins>(thread, shared.bins);
    WalkTiles(thread, work, [&](uint64_t tile) {
      VisitTile<kFeedback>(thread, work, tile, [&](float x, uint64_t, bool) {
        const uint32_t magnitude = MagnitudeBits(x);
        if (magnitude != 0) thread.Add(&shared.bins[magnitude >> 20], 1u);
      });
    });
    AddBins<kUpperBins>(thread, shared.bins, work.state->upper);
  }
};

// Finds the cut by the upper bits, writes each tile's candidates side by side, and counts those at
// the cut by their middle bits. Sets the residual of every element that is finite.
template <bool kFeedback>
struct GatherKernel {
  static constexpr uint32_t kThreads = kTopKThreads;
  struct Shared {
    CutShared cut;
    uint32_t bins[kLaterBins];
  };
  using Args = TopKWork;

  template <class Thread>
  THALWEG_DEVICE static void Run(const Thread& thread, Shared& shared, const Args& work) {
    ClearBins<kLaterBins>(thread, shared.bins);
    uint32_t chosen = 0;
    const TopKCut cut =
        FindCut<kUpperBins, true>(thread, shared.cut, work.state->upper, work.wanted, &chosen);
    if (thread.Block() == 0 && thread.Index() == 0) {
      work.state->chosen = chosen;
      work.state->nonfinite = shared.cut.nonfinite;
      work.state->cut[0] = cut;
    }
    WalkTiles(thread, work, [&](uint64_t tile) { Gather(thread, shared, work, tile, cut.bin); });
    AddBins<kLaterBins>(thread, shared.bins, work.state->middle);
  }

  template <class Thread>
  THALWEG_DEVICE static void Gather(const Thread& thread, Shared& shared, const Args& work,
                                    uint64_t tile, uint32_t cut_bin) {
    const uint64_t begin = tile * kTopKTileElems;
    uint32_t candidates = 0;
    VisitTile<kFeedback>(thread, work, tile, [&](float x, uint64_t i, bool there) {
      const uint32_t bits = BitCast<uint32_t>(x);
      const uint32_t magnitude = MagnitudeBits(x);
      const bool candidate = magnitude != 0 && magnitude >> 20 >= cut_bin;
      const uint32_t found = thread.Ballot(candidate);
      if (candidate) {
        const uint64_t at = begin + candidates + CountBits(found & LanesBelow(thread));
        work.bits[at] = bits;
        work.offsets[at] = static_cast<uint16_t>(i - begin);
        if (magnitude >> 20 == cut_bin) {
          thread.Add(&shared.bins[(magnitude >> 10) % kLaterBins], 1u);
        }
      }
      candidates += CountBits(found);
      if (kFeedback && there && IsFinite<Fp32>(bits)) work.residual[i] = x;
    });
    if (thread.Lane() == 0) work.tiles[tile].candidates = candidates;
  }
};

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

// Finds the cut by the upper 21 bits and counts the candidates at it by the lower ones.
struct CountLowerKernel {
  static constexpr uint32_t kThreads = kTopKThreads;
  struct Shared {
    CutShared cut;
    uint32_t bins[kLaterBins];
  };
  using Args = TopKWork;

  template <class Thread>
  THALWEG_DEVICE static void Run(const Thread& thread, Shared& shared, const Args& work) {
    ClearBins<kLaterBins>(thread, shared.bins);
    const TopKCut upper = work.state->cut[0];
    TopKCut cut =
        FindCut<kLaterBins, false>(thread, shared.cut, work.state->middle, upper.taken, nullptr);
    cut.bin += upper.bin * kLaterBins;
    if (thread.Block() == 0 && thread.Index() == 0) work.state->cut[1] = cut;
    WalkTiles(thread, work, [&](uint64_t tile) {
      VisitCandidates(thread, work, tile, [&](uint32_t bits, uint32_t, bool there) {
        const uint32_t magnitude = bits & Fp32::kMagnitude;
        if (there && magnitude >> 10 == cut.bin) {
          thread.Add(&shared.bins[magnitude % kLaterBins], 1u);
        }
      });
    });
    AddBins<kLaterBins>(thread, shared.bins, work.state->lower);
  }
};

// Finds the least magnitude that is chosen, and how many candidates of each tile have it.
struct CountEqualKernel {
  static constexpr uint32_t kThreads = kTopKThreads;
  using Shared = CutShared;
  using Args = TopKWork;

  template <class Thread>
  THALWEG_DEVICE static void Run(const Thread& thread, Shared& shared, const Args& work) {
    const TopKCut upper = work.state->cut[1];
    TopKCut cut =
        FindCut<kLaterBins, false>(thread, shared, work.state->lower, upper.taken, nullptr);
    cut.bin += upper.bin * kLaterBins;
    if (thread.Block() == 0 && thread.Index() == 0) work.state->cut[2] = cut;
    WalkTiles(thread, work, [&](uint64_t tile) {
      uint32_t equal = 0;
      VisitCandidates(thread, work, tile, [&](uint32_t bits, uint32_t, bool there) {
        equal += CountBits(thread.Ballot(there && (bits & Fp32::kMagnitude) == cut.bin));
      });
      if (thread.Lane() == 0) work.tiles[tile].equal = equal;
    });
  }
};

}  // namespace thalweg
