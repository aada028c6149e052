#include "kernels/codec/powersgd/powersgd_launch.h"
#include "kernels/codec/powersgd/powersgd_scalar.h"
#include "kernels/codec/powersgd/tile.h"
#include "kernels/launch/launch.h"

namespace thalweg {
namespace {

// This kernel does pass 2 on a strip of columns: threads take groups of kSummedRows rows in
// parallel, and the groups' sums are then added in order. A thread thus need not walk all rows of
// its columns to get the same bits.
struct TransposedKernel {
  static constexpr uint32_t kThreads = kPowerSgdThreads;
  static constexpr uint32_t kMostGroups = kThreads * 4 / kStripColumns;
  static constexpr uint32_t kMostRanks = 8;
  struct Shared {
    float sums[kMostGroups * kMostRanks * kStripColumns];
  };
  using Args = TransposedWork;

  struct Strip {
    const float* x;  // at its first column
    const float* p;  // at the first column that is used
    float* q;
    uint64_t rows;
    uint64_t cols;  // of the matrix
    uint32_t rank;
    uint32_t width;
  };

  template <class Thread>
  THALWEG_DEVICE static void Run(const Thread& thread, Shared& shared, const Args& args) {
    const PowerSgdTile tile = args.table.tiles[thread.Block()];
    const PowerSgdMatrix& m = args.table.matrices[tile.matrix];
    Strip strip = {.x = args.x + m.offset + tile.begin,
                   .p = args.p + m.p_offset,
                   .q = args.q + m.q_offset + tile.begin,
                   .rows = m.rows,
                   .cols = m.cols,
                   .rank = m.rank,
                   .width = tile.end - tile.begin};
    const bool wide = HasWideRows(strip.x, m.cols);
    for (uint32_t c = 0; c < m.rank;) {
      const uint32_t ranks = ColumnsAtOnce(m.rank - c);
      if (wide) {
        SumColumns<4>(thread, shared, strip, ranks);
      } else {
        SumColumns<1>(thread, shared, strip, ranks);
      }
      c += ranks;
      strip.p += ranks;
      strip.q += ranks * m.cols;
    }
  }

  template <int kWide, class Thread>
  THALWEG_DEVICE static void SumColumns(const Thread& thread, Shared& shared, const Strip& strip,
                                        uint32_t ranks) {
    switch (ranks) {
      case 8:
        return Sum<8, kWide>(thread, shared, strip);
      case 4:
        return Sum<4, kWide>(thread, shared, strip);
      case 2:
        return Sum<2, kWide>(thread, shared, strip);
      default:
        return Sum<1, kWide>(thread, shared, strip);
    }
  }

  template <int kRanks, int kWide, class Thread>
  THALWEG_DEVICE static void Sum(const Thread& thread, Shared& shared, const Strip& strip) {
    constexpr uint32_t kLanes = kStripColumns / kWide;
    constexpr uint32_t kGroups = kThreads / kLanes;
    const uint32_t column = thread.Index() % kLanes * kWide;
    const uint32_t mine = thread.Index() / kLanes;
    const uint64_t groups = (strip.rows + kSummedRows - 1) / kSummedRows;
    float total = 0;  // for row Index() / 32 and column Index() % 32 of Q
    for (uint64_t first = 0; first < groups; first += kGroups) {
      float sums[kRanks][kWide] = {};
      if (column < strip.width) SumGroup<kRanks, kWide>(strip, first + mine, column, sums);
      if (first > 0) thread.SyncBlock();  // until the previous sums have been added
      for (int k = 0; k < kRanks; ++k) {
        for (int w = 0; w < kWide; ++w) {
          shared.sums[(mine * kRanks + k) * kStripColumns + column + w] = sums[k][w];
        }
      }
      thread.SyncBlock();
      const uint64_t left = groups - first;
      for (uint32_t g = 0; g < kGroups && g < left && thread.Warp() < kRanks; ++g) {
        const float sum = shared.sums[g * kRanks * kStripColumns + thread.Index()];
        total = first + g == 0 ? sum : total + sum;
      }
    }
    if (thread.Warp() < kRanks && thread.Lane() < strip.width) {
      strip.q[thread.Warp() * strip.cols + thread.Lane()] = total;
    }
    thread.SyncBlock();  // before the next columns are summed
  }

  // Computes a group's sums; rows of a missing group add nothing.
  template <int kRanks, int kWide>
  THALWEG_DEVICE static void SumGroup(const Strip& strip, uint64_t group, uint32_t column,
                                      float (&sums)[kRanks][kWide]) {
    const uint64_t first = group * kSummedRows;
    const uint64_t left = first < strip.rows ? strip.rows - first : 0;
    Floats<kWide> x[kSummedRows];
    for (uint32_t r = 0; r < kSummedRows; ++r) {
      if (r < left) x[r] = LoadFloats<kWide>(strip.x + (first + r) * strip.cols + column);
    }
    for (uint32_t r = 0; r < kSummedRows; ++r) {
      if (r >= left) continue;
      for (int k = 0; k < kRanks; ++k) {
        const float factor = strip.p[(first + r) * strip.rank + k];
        for (int w = 0; w < kWide; ++w) sums[k][w] = Fma(factor, x[r].at[w], sums[k][w]);
      }
    }
  }
};
static_assert(TransposedKernel::kMostRanks * 32 <= TransposedKernel::kThreads,
              "a warp adds up one row of Q");
static_assert(kStripColumns == 32, "a lane adds up one column");

}  // namespace

LaunchError LaunchTransposed(CudaStream stream, uint32_t tiles, const TransposedWork& work) {
  return Launch<TransposedKernel>(stream, tiles, work);
}

}  // namespace thalweg
