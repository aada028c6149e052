#include "kernels/codec/powersgd/powersgd_launch.h"
#include "kernels/codec/powersgd/powersgd_scalar.h"
#include "kernels/codec/powersgd/tile.h"
#include "kernels/launch/combine.h"
#include "kernels/launch/launch.h"

namespace thalweg {
namespace {

// A Reconstruction is one matrix of pass 3.
struct Reconstruction {
  const float* p;
  const float* q;
  float* error;
  float* out;
  uint64_t cols;
  uint32_t rank;

  // kRank is `rank`, or 0 for any other.
  template <int kRank, int kWide>
  THALWEG_DEVICE uint32_t Walk(const RowGroup& group) const {
    constexpr int kHeld = kRank > 0 ? kRank : 1;
    float rows[kRowsAtOnce][kHeld] = {};  // rows of P
    for (uint32_t r = 0; kRank > 0 && r < group.count; ++r) {
      for (int k = 0; k < kHeld; ++k) rows[r][k] = p[(group.first + r) * rank + k];
    }
    uint32_t nonfinite = 0;
    for (uint64_t j = group.lane * kWide; group.count > 0 && j < cols; j += group.lanes * kWide) {
      const uint64_t at = group.first * cols + j;
      Floats<kWide> x[kRowsAtOnce] = {};
      for (uint32_t r = 0; r < kRowsAtOnce && error != nullptr; ++r) {
        if (r < group.count) x[r] = LoadFloats<kWide>(error + at + r * cols);
      }
      Floats<kWide> sums[kRowsAtOnce];
      if constexpr (kRank > 0) {
        Multiply<kRank, kWide>(rows, j, sums);
      } else {
        MultiplyAny<kWide>(group, j, sums);
      }
      nonfinite += Store<kWide>(group.count, at, x, sums);
    }
    return nonfinite;
  }

  template <int kRank, int kWide>
  THALWEG_DEVICE void Multiply(const float (&rows)[kRowsAtOnce][kRank], uint64_t j,
                               Floats<kWide> (&sums)[kRowsAtOnce]) const {
    Floats<kWide> factors[kRank];
    for (int k = 0; k < kRank; ++k) factors[k] = LoadFloats<kWide>(q + k * cols + j);
    for (uint32_t r = 0; r < kRowsAtOnce; ++r) {
      for (int w = 0; w < kWide; ++w) {
        float sum = rows[r][0] * factors[0].at[w];
        for (int k = 1; k < kRank; ++k) sum = Fma(rows[r][k], factors[k].at[w], sum);
        sums[r].at[w] = sum;
      }
    }
  }

  template <int kWide>
  THALWEG_DEVICE void MultiplyAny(const RowGroup& group, uint64_t j,
                                  Floats<kWide> (&sums)[kRowsAtOnce]) const {
    for (uint32_t k = 0; k < rank; ++k) {
      const Floats<kWide> factors = LoadFloats<kWide>(q + k * cols + j);
      for (uint32_t r = 0; r < kRowsAtOnce; ++r) {
        const float row = r < group.count ? p[(group.first + r) * rank + k] : 0;
        for (int w = 0; w < kWide; ++w) {
          float& sum = sums[r].at[w];
          sum = k == 0 ? row * factors.at[w] : Fma(row, factors.at[w], sum);
        }
      }
    }
  }

  // Returns how many results are not finite.
  template <int kWide>
  THALWEG_DEVICE uint32_t Store(uint32_t count, uint64_t at, Floats<kWide> (&x)[kRowsAtOnce],
                                Floats<kWide> (&results)[kRowsAtOnce]) const {
    uint32_t nonfinite = 0;
    for (uint32_t r = 0; r < kRowsAtOnce; ++r) {
      if (r >= count) continue;
      for (int w = 0; w < kWide; ++w) {
        float& result = results[r].at[w];
        x[r].at[w] = ErrorAfter(x[r].at[w], result);
        if (!IsFinite<Fp32>(BitCast<uint32_t>(result))) ++nonfinite;
        if (result != result) result = BitCast<float>(Fp32::kNan);
      }
      if (error != nullptr) StoreFloats<kWide>(x[r], error + at + r * cols);
      StoreFloats<kWide>(results[r], out + at + r * cols);
    }
    return nonfinite;
  }
};

struct ReconstructKernel {
  static constexpr uint32_t kThreads = kPowerSgdThreads;
  struct Shared {};
  using Args = ReconstructWork;

  template <class Thread>
  THALWEG_DEVICE static void Run(const Thread& thread, Shared&, const Args& args) {
    const PowerSgdTile tile = args.table.tiles[thread.Block()];
    const PowerSgdMatrix& m = args.table.matrices[tile.matrix];
    const Reconstruction matrix = {.p = args.p + m.p_offset,
                                   .q = args.q + m.q_offset,
                                   .error = From(args.error, m.offset),
                                   .out = args.out + m.offset,
                                   .cols = m.cols,
                                   .rank = m.rank};
    const bool wide = HasWideRows(matrix.q, m.cols) && HasWideRows(matrix.error, m.cols) &&
                      HasWideRows(matrix.out, m.cols);
    uint32_t nonfinite = 0;
    ForEachRowGroup(thread, tile, [&](const RowGroup& group) {
      nonfinite += wide ? Reconstruct<4>(matrix, group) : Reconstruct<1>(matrix, group);
    });
    AddInWarp(thread, nonfinite, args.nonfinite);
  }

  template <int kWide>
  THALWEG_DEVICE static uint32_t Reconstruct(const Reconstruction& matrix, const RowGroup& group) {
    switch (matrix.rank) {
      case 1:
        return matrix.Walk<1, kWide>(group);
      case 2:
        return matrix.Walk<2, kWide>(group);
      case 4:
        return matrix.Walk<4, kWide>(group);
      case 8:
        return matrix.Walk<8, kWide>(group);
      default:
        return matrix.Walk<0, kWide>(group);
    }
  }
};

}  // namespace

LaunchError LaunchReconstruct(CudaStream stream, uint32_t tiles, const ReconstructWork& work) {
  return Launch<ReconstructKernel>(stream, tiles, work);
}

}  // namespace thalweg
