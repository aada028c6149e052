#include "kernels/codec/topk/select_kernels.h"
#include "kernels/codec/topk/tiles.h"
#include "kernels/launch/combine.h"
#include "kernels/launch/launch.h"

namespace thalweg {
namespace {

// Kernels that walk over tiles have at most this many blocks: all that 132 multiprocessors run at
// once.
constexpr uint64_t kMostBlocks = uint64_t{132} * 8;

constexpr uint64_t kCountBytes = sizeof(uint32_t);

// A single block walks over all tiles.
constexpr uint32_t kScanThreads = 1024;

// Computes for each tile how many candidates before it have the smallest chosen magnitude.
struct ScanEqualKernel {
  static constexpr uint32_t kThreads = kScanThreads;
  struct Shared {
    uint32_t warps[kThreads / 32];
  };
  using Args = TopKWork;

  template <class Thread>
  THALWEG_DEVICE static void Run(const Thread& thread, Shared& shared, const Args& work) {
    const uint64_t tiles = TilesOf(work.elems);
    uint32_t before = 0;
    for (uint64_t first = 0; first < tiles; first += kThreads) {
      const uint64_t tile = first + thread.Index();
      const uint32_t equal = tile < tiles ? work.tiles[tile].equal : 0;
      const auto scan = ScanBlock<kThreads>(thread, shared.warps, equal, SumOf());
      if (tile < tiles) work.tiles[tile].equal = before + scan.before;
      before += scan.all;
    }
  }
};

// Calls visit(bits, index, next, chosen) for the candidates of a tile, 32 at a time, with all
// lanes; `next` is the index after the last one chosen before, `start` for the first.
template <class Thread, class Visit>
THALWEG_DEVICE inline void VisitChosen(const Thread& thread, const TopKWork& work, uint64_t tile,
                                       uint64_t start, const Visit& visit) {
  const TopKCut cut = work.state->cut[2];
  uint32_t equal_before = work.tiles[tile].equal;
  uint64_t next = start;
  VisitCandidates(thread, work, tile, [&](uint32_t bits, uint32_t offset, bool there) {
    const uint32_t magnitude = bits & Fp32::kMagnitude;
    const uint64_t index = tile * kTopKTileElems + offset;
    const uint32_t equals = thread.Ballot(there && magnitude == cut.bin);
    const uint32_t rank = equal_before + CountBits(equals & LanesBelow(thread));
    const bool chosen =
        there && (magnitude > cut.bin || (magnitude == cut.bin && rank < cut.taken));
    const uint32_t all_chosen = thread.Ballot(chosen);
    const uint32_t chosen_below = all_chosen & LanesBelow(thread);
    const uint64_t neighbour =
        thread.Shuffle(index + 1, chosen_below != 0 ? HighestBit(chosen_below) : 0);
    visit(bits, index, chosen_below != 0 ? neighbour : next, chosen);
    if (all_chosen != 0) next = thread.Shuffle(index + 1, HighestBit(all_chosen));
    equal_before += CountBits(equals);
  });
}

// Computes how many bytes the entries of each tile take, without the gap before its first one.
struct MeasureKernel {
  static constexpr uint32_t kThreads = kTopKThreads;
  struct Shared {};
  using Args = TopKWork;

  template <class Thread>
  THALWEG_DEVICE static void Run(const Thread& thread, Shared&, const Args& work) {
    WalkTiles(thread, work, [&](uint64_t tile) {
      constexpr uint64_t kNone = ~uint64_t{0};
      uint32_t bytes = 0;
      uint32_t first = 0;
      uint32_t next = 0;
      VisitChosen(thread, work, tile, kNone,
                  [&](uint32_t, uint64_t index, uint64_t before, bool chosen) {
                    if (!chosen) return;
                    if (before == kNone) {
                      first = static_cast<uint32_t>(index);
                    } else {
                      bytes += GapBytes(index - before);
                    }
                    bytes += sizeof(float);
                    next = static_cast<uint32_t>(index) + 1;
                  });
      // A lane that has not seen the first entry has 0; so has one that has chosen none.
      const uint32_t all_bytes = ScanWarp(thread, bytes, SumOf()).all;
      const uint32_t first_chosen = ScanWarp(thread, first, MaxOf()).all;
      const uint32_t last_next = ScanWarp(thread, next, MaxOf()).all;
      if (thread.Lane() == 0) {
        work.tiles[tile].first = first_chosen;
        work.tiles[tile].next = last_next;
        work.tiles[tile].bytes = all_bytes;
      }
    });
  }
};

// Computes where the entries of each tile begin in the payload, and the payload's count and size.
struct PlaceKernel {
  static constexpr uint32_t kThreads = kScanThreads;
  struct Shared {
    uint32_t nexts[kThreads / 32];
    uint64_t bytes[kThreads / 32];
  };
  using Args = TopKWork;

  template <class Thread>
  THALWEG_DEVICE static void Run(const Thread& thread, Shared& shared, const Args& work) {
    const uint64_t tiles = TilesOf(work.elems);
    uint32_t next = 0;
    uint64_t at = kCountBytes;
    for (uint64_t begin = 0; begin < tiles; begin += kThreads) {
      const uint64_t number = begin + thread.Index();
      const TopKTile tile = number < tiles ? work.tiles[number] : TopKTile{};
      const auto nexts = ScanBlock<kThreads>(thread, shared.nexts, tile.next, MaxOf());
      const uint32_t before = MaxOf()(next, nexts.before);
      const uint64_t bytes = tile.next == 0 ? 0 : tile.bytes + GapBytes(tile.first - before);
      const auto offsets = ScanBlock<kThreads>(thread, shared.bytes, bytes, SumOf());
      if (number < tiles) {
        work.tiles[number].next = before;
        work.tiles[number].bytes = at + offsets.before;
      }
      next = MaxOf()(next, nexts.all);
      at += offsets.all;
    }
    if (thread.Index() != 0) return;
    StoreBits<Fp32>(work.state->chosen, work.out, 0);
    *work.encoded = {at, work.state->nonfinite};
  }
};

// Writes the entries, and sets the residuals of elements that are sent as numbers to 0.
struct WriteKernel {
  static constexpr uint32_t kThreads = kTopKThreads;
  struct Shared {};
  using Args = TopKWork;

  template <class Thread>
  THALWEG_DEVICE static void Run(const Thread& thread, Shared&, const Args& work) {
    WalkTiles(thread, work, [&](uint64_t tile) {
      uint64_t at = work.tiles[tile].bytes;
      VisitChosen(thread, work, tile, work.tiles[tile].next,
                  [&](uint32_t bits, uint64_t index, uint64_t before, bool chosen) {
                    const uint32_t bytes = chosen ? GapBytes(index - before) + sizeof(float) : 0;
                    const auto places = ScanWarp(thread, bytes, SumOf());
                    if (chosen) {
                      PutEntry(index - before, Fp32::Widen(bits), work.out + at + places.before);
                      if (work.residual != nullptr && IsFinite<Fp32>(bits)) {
                        work.residual[index] = 0;
                      }
                    }
                    at += places.all;
                  });
    });
  }
};

struct ScatterKernel {
  static constexpr uint32_t kThreads = 256;
  struct Shared {};
  struct Args {
    const uint32_t* indices;
    const float* values;
    uint64_t count;
    float* out;
  };

  template <class Thread>
  THALWEG_DEVICE static void Run(const Thread& thread, Shared&, const Args& args) {
    const uint64_t i = uint64_t{thread.Block()} * kThreads + thread.Index();
    if (i < args.count) args.out[args.indices[i]] = args.values[i];
  }
};

// A Queue queues launches until one fails.
class Queue {
 public:
  Queue(CudaStream stream, const TopKWork& work) : stream_(stream), work_(work) {
    error_ = FillZero(stream, work.state, sizeof(TopKState));
  }

  template <class Kernel>
  void Add(uint64_t blocks) {
    if (error_ == 0) error_ = Launch<Kernel>(stream_, blocks, work_);
  }

  LaunchError error() const { return error_; }

 private:
  CudaStream stream_;
  const TopKWork& work_;
  LaunchError error_;
};

template <bool kFeedback>
LaunchError Encode(CudaStream stream, const TopKWork& work) {
  const uint64_t needed = BlocksFor(TilesOf(work.elems), kTilesAtOnce);
  const uint64_t blocks = needed < kMostBlocks ? needed : kMostBlocks;
  Queue queue(stream, work);
  queue.Add<CountUpperKernel<kFeedback>>(blocks);
  queue.Add<GatherKernel<kFeedback>>(blocks);
  queue.Add<CountLowerKernel>(blocks);
  queue.Add<CountEqualKernel>(blocks);
  queue.Add<ScanEqualKernel>(1);
  queue.Add<MeasureKernel>(blocks);
  queue.Add<PlaceKernel>(1);
  queue.Add<WriteKernel>(blocks);
  return queue.error();
}

}  // namespace

LaunchError LaunchEncodeTopK(CudaStream stream, const TopKWork& work) {
  return work.residual == nullptr ? Encode<false>(stream, work) : Encode<true>(stream, work);
}

LaunchError LaunchScatterTopK(CudaStream stream, const uint32_t* indices, const float* values,
                              uint64_t count, float* out, uint64_t elems) {
  const LaunchError error = FillZero(stream, out, elems * sizeof(float));
  if (error != 0) return error;
  return Launch<ScatterKernel>(stream, BlocksFor(count, ScatterKernel::kThreads),
                               {indices, values, count, out});
}

}  // namespace thalweg
