// These kernels of topk find which elements are chosen, with a radix select over magnitudes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cast/element.h"
#include "kernels/codec/topk/bins.h"
#include "kernels/codec/topk/tiles.h"
#include "kernels/codec/topk/topk_launch.h"
#include "kernels/codec/topk/topk_scalar.h"

namespace thalweg {

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

// Finds the cut by the upper bits, writes each tile's candidates contiguously, and counts those at
// the cut by their middle bits. Sets the residual of every finite element.
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

// Finds the smallest chosen magnitude, and how many candidates of each tile have it.
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
