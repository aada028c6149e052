#include "kernels/codec/powersgd/powersgd_launch.h"
#include "kernels/codec/powersgd/powersgd_scalar.h"
#include "kernels/codec/powersgd/tile.h"
#include "kernels/launch/combine.h"
#include "kernels/launch/launch.h"

namespace thalweg {
namespace {

constexpr uint32_t kWarps = kPowerSgdThreads / 32;
constexpr uint32_t kMostRanks = 8;

// A Projection is one matrix of pass 1.
struct Projection {
  const float* gradient;
  float* error;
  const float* q;  // at the first column that is computed
  float* p;
  uint64_t cols;
  uint32_t rank;
  bool adds;  // otherwise X already lies in `error`, or is `gradient`

  // Loads kWide columns of a row group's rows of X. Missing elements are zero.
  template <int kWide>
  THALWEG_DEVICE uint32_t LoadX(const RowGroup& group, uint64_t j,
                                Floats<kWide> (&x)[kRowsAtOnce]) const {
    const uint64_t at = group.first * cols + j;
    const float* const from = adds || error == nullptr ? gradient : error;
    for (uint32_t r = 0; r < kRowsAtOnce; ++r) {
      x[r] = {};
      if (r < group.count) x[r] = LoadFloats<kWide>(from + at + r * cols);
    }
    return adds ? Add<kWide>(group.count, at, x) : 0;
  }

  // Returns how many elements of the gradient, given in `x`, are not finite.
  template <int kWide>
  THALWEG_DEVICE uint32_t Add(uint32_t count, uint64_t at, Floats<kWide> (&x)[kRowsAtOnce]) const {
    uint32_t nonfinite = 0;
    Floats<kWide> e[kRowsAtOnce] = {};
    for (uint32_t r = 0; r < kRowsAtOnce && error != nullptr; ++r) {
      if (r < count) e[r] = LoadFloats<kWide>(error + at + r * cols);
    }
    for (uint32_t r = 0; r < kRowsAtOnce; ++r) {
      for (int w = 0; w < kWide; ++w) {
        const float g = x[r].at[w];
        if (!IsFinite<Fp32>(BitCast<uint32_t>(g))) ++nonfinite;
        if (error == nullptr) continue;
        x[r].at[w] = g + e[r].at[w];
        e[r].at[w] = StoredSum(g, e[r].at[w], x[r].at[w]);
      }
      if (error != nullptr && r < count) StoreFloats<kWide>(e[r], error + at + r * cols);
    }
    return nonfinite;
  }

  // Computes this thread's part of kRanks columns of a group's rows of P. Returns what Add()
  // returns.
  template <int kRanks, int kWide>
  THALWEG_DEVICE uint32_t Walk(const RowGroup& group, float (&sums)[kRowsAtOnce][kRanks]) const {
    uint32_t nonfinite = 0;
    for (uint64_t j = group.lane * kWide; group.count > 0 && j < cols; j += group.lanes * kWide) {
      Floats<kWide> factors[kRanks];
      for (int k = 0; k < kRanks; ++k) factors[k] = LoadFloats<kWide>(q + k * cols + j);
      Floats<kWide> x[kRowsAtOnce];
      nonfinite += LoadX<kWide>(group, j, x);
      for (uint32_t r = 0; r < kRowsAtOnce; ++r) {
        for (int k = 0; k < kRanks; ++k) {
          for (int w = 0; w < kWide; ++w) {
            sums[r][k] = Fma(x[r].at[w], factors[k].at[w], sums[r][k]);
          }
        }
      }
    }
    return nonfinite;
  }
};

struct ProjectKernel {
  static constexpr uint32_t kThreads = kPowerSgdThreads;
  struct Shared {
    float sums[kWarps][kRowsAtOnce * kMostRanks];
  };
  using Args = ProjectWork;

  template <class Thread>
  THALWEG_DEVICE static void Run(const Thread& thread, Shared& shared, const Args& args) {
    const PowerSgdTile tile = args.table.tiles[thread.Block()];
    const PowerSgdMatrix& m = args.table.matrices[tile.matrix];
    const Projection all = {.gradient = args.gradient + m.offset,
                            .error = From(args.error, m.offset),
                            .q = args.q + m.q_offset,
                            .p = args.p + m.p_offset,
                            .cols = m.cols,
                            .rank = m.rank,
                            .adds = true};
    const bool wide = HasWideRows(all.gradient, m.cols) && HasWideRows(all.error, m.cols) &&
                      HasWideRows(all.q, m.cols);
    uint32_t nonfinite = 0;
    ForEachRowGroup(thread, tile, [&](const RowGroup& group) {
      for (uint32_t c = 0; c < all.rank;) {
        const uint32_t ranks = ColumnsAtOnce(all.rank - c);
        Projection some = all;
        some.adds = c == 0;
        some.q += c * all.cols;
        some.p += c;
        nonfinite += wide ? ProjectColumns<4>(thread, shared, some, group, ranks)
                          : ProjectColumns<1>(thread, shared, some, group, ranks);
        c += ranks;
      }
    });
    AddInWarp(thread, nonfinite, args.nonfinite);
  }

  template <int kWide, class Thread>
  THALWEG_DEVICE static uint32_t ProjectColumns(const Thread& thread, Shared& shared,
                                                const Projection& matrix, const RowGroup& group,
                                                uint32_t ranks) {
    switch (ranks) {
      case 8:
        return Project<8, kWide>(thread, shared, matrix, group);
      case 4:
        return Project<4, kWide>(thread, shared, matrix, group);
      case 2:
        return Project<2, kWide>(thread, shared, matrix, group);
      default:
        return Project<1, kWide>(thread, shared, matrix, group);
    }
  }

  template <int kRanks, int kWide, class Thread>
  THALWEG_DEVICE static uint32_t Project(const Thread& thread, Shared& shared,
                                         const Projection& matrix, const RowGroup& group) {
    float sums[kRowsAtOnce][kRanks] = {};
    const uint32_t nonfinite = matrix.Walk<kRanks, kWide>(group, sums);
    for (uint32_t mask = (group.lanes < 32 ? group.lanes : 32) / 2; mask > 0; mask /= 2) {
      for (auto& row : sums) {
        for (float& sum : row) sum += thread.ShuffleXor(sum, mask);
      }
    }
    if (group.lanes > 32) AddWarps<kRanks>(thread, shared, sums);
    for (uint32_t r = 0; r < group.count && group.lane == 0; ++r) {
      for (int k = 0; k < kRanks; ++k) {
        matrix.p[(group.first + r) * matrix.rank + k] = sums[r][k];
      }
    }
    return nonfinite;
  }

  // Adds the sums of all warps in their order; thread 0 gets the total.
  template <int kRanks, class Thread>
  THALWEG_DEVICE static void AddWarps(const Thread& thread, Shared& shared,
                                      float (&sums)[kRowsAtOnce][kRanks]) {
    if (thread.Lane() == 0) {
      for (uint32_t r = 0; r < kRowsAtOnce; ++r) {
        for (int k = 0; k < kRanks; ++k) shared.sums[thread.Warp()][r * kRanks + k] = sums[r][k];
      }
    }
    thread.SyncBlock();
    if (thread.Warp() == 0) {
      float total = 0;
      const uint32_t mine = thread.Lane();
      for (uint32_t warp = 0; warp < kWarps && mine < kRowsAtOnce * kRanks; ++warp) {
        total += shared.sums[warp][mine];
      }
      for (uint32_t r = 0; r < kRowsAtOnce; ++r) {
        for (int k = 0; k < kRanks; ++k) sums[r][k] = thread.Shuffle(total, r * kRanks + k);
      }
    }
    thread.SyncBlock();
  }
};

struct RestoreKernel {
  static constexpr uint32_t kThreads = kPowerSgdThreads;
  struct Shared {};
  using Args = RestoreWork;

  template <class Thread>
  THALWEG_DEVICE static void Run(const Thread& thread, Shared&, const Args& args) {
    const PowerSgdTile tile = args.table.tiles[thread.Block()];
    const PowerSgdMatrix& m = args.table.matrices[tile.matrix];
    const uint64_t first = m.offset + tile.begin * m.cols;
    const uint64_t elems = (tile.end - tile.begin) * m.cols;
    if (HasWideRows(args.gradient + first, m.cols) && HasWideRows(args.error + first, m.cols)) {
      Restore<4>(thread, args.gradient + first, args.error + first, elems);
    } else {
      Restore<1>(thread, args.gradient + first, args.error + first, elems);
    }
  }

  template <int kWide, class Thread>
  THALWEG_DEVICE static void Restore(const Thread& thread, const float* gradient, float* error,
                                     uint64_t elems) {
    for (uint64_t i = thread.Index() * kWide; i < elems; i += kThreads * kWide) {
      const Floats<kWide> g = LoadFloats<kWide>(gradient + i);
      Floats<kWide> x = LoadFloats<kWide>(error + i);
      for (int w = 0; w < kWide; ++w) x.at[w] = RestoredError(g.at[w], x.at[w]);
      StoreFloats<kWide>(x, error + i);
    }
  }
};

}  // namespace

LaunchError LaunchProject(CudaStream stream, uint32_t tiles, const ProjectWork& work) {
  return Launch<ProjectKernel>(stream, tiles, work);
}

LaunchError LaunchRestore(CudaStream stream, uint32_t tiles, const RestoreWork& work) {
  return Launch<RestoreKernel>(stream, tiles, work);
}

}  // namespace thalweg
