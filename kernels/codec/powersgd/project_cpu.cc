#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "kernels/codec/powersgd/powersgd.h"
#include "kernels/codec/powersgd/powersgd_scalar.h"

// Arrays of vectors hold the sums, so the vectors' length must be known: SVE uses NEON's.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/codec/powersgd/project_cpu.cc"
#include "hwy/foreach_target.h"  // compiles the rest of this file once per target
#include "hwy/highway.h"
#include "kernels/cast/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace thalweg {
namespace HWY_NAMESPACE {

#if THALWEG_VECTORS
using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;

constexpr float kLargest = std::numeric_limits<float>::max();
#endif

// This many sums are kept in registers at once: half of the 16 of AVX2.
constexpr size_t kSums = 8;

// Pass 1 takes this many rows between changes of the factor's columns; they stay in the first-level
// cache.
constexpr size_t kTileRows = 4;

// Pass 2 keeps the sums of this many columns in the second-level cache: 64 KiB for all columns of
// the factor. Rows are then read in long pieces, which matters more to the memory than sums in the
// first-level cache.
constexpr size_t kStripFloats = 16384;

// Returns how many columns of a factor one pass over a block handles: 8, 4, 2 or 1.
size_t ColumnsAtOnce(size_t left) { return left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1; }

// PlainRows are rows of a matrix, unchanged.
struct PlainRows {
  const float* x;
  size_t cols;

  float At(size_t row, size_t j) const { return x[row * cols + j]; }
#if THALWEG_VECTORS
  HWY_INLINE V Load(size_t row, size_t j) const { return hn::LoadU(D(), x + row * cols + j); }
#endif
  PlainRows From(size_t row) const { return {x + row * cols, cols}; }
};

// AddedRows are rows of gradient + error; each element that is read is stored in x, too.
struct AddedRows {
  const float* gradient;
  const float* error;
  float* x;
  size_t cols;

  float At(size_t row, size_t j) const {
    const float g = gradient[row * cols + j];
    const float e = error[row * cols + j];
    const float sum = g + e;
    x[row * cols + j] = StoredSum(g, e, sum);
    return sum;
  }
#if THALWEG_VECTORS
  HWY_INLINE V Load(size_t row, size_t j) const {
    const D d;
    const V g = hn::LoadU(d, gradient + row * cols + j);
    const V e = hn::LoadU(d, error + row * cols + j);
    const V sum = hn::Add(g, e);
    const V largest = hn::Set(d, kLargest);
    const V clamped = hn::Max(hn::Min(sum, largest), hn::Neg(largest));
    const auto finite = hn::Le(hn::Abs(g), largest);
    hn::StoreU(hn::IfThenElse(finite, clamped, e), d, x + row * cols + j);
    return sum;
  }
#endif
  AddedRows From(size_t row) const {
    return {gradient + row * cols, error + row * cols, x + row * cols, cols};
  }
};

// Computes kRanks columns of kRows rows of P: p[row · stride + c].
template <size_t kRanks, size_t kRows, class Rows>
void ProjectRows(Rows rows, const float* q, float* p, size_t stride) {
  const size_t cols = rows.cols;
  float sums[kRows][kRanks] = {};
  size_t j = 0;
#if THALWEG_VECTORS
  const D d;
  const size_t lanes = hn::Lanes(d);
  V vectors[kRows][kRanks];
  for (auto& row : vectors) {
    for (V& sum : row) sum = hn::Zero(d);
  }
  for (; cols - j >= lanes; j += lanes) {
    V x[kRows];
    HWY_UNROLL(8)
    for (size_t r = 0; r < kRows; ++r) x[r] = rows.Load(r, j);
    HWY_UNROLL(8)
    for (size_t c = 0; c < kRanks; ++c) {
      const V factor = hn::LoadU(d, q + c * cols + j);
      HWY_UNROLL(8)
      for (size_t r = 0; r < kRows; ++r) vectors[r][c] = hn::MulAdd(x[r], factor, vectors[r][c]);
    }
  }
  HWY_UNROLL(8)
  for (size_t r = 0; r < kRows; ++r) {
    HWY_UNROLL(8)
    for (size_t c = 0; c < kRanks; ++c) sums[r][c] = hn::GetLane(hn::SumOfLanes(d, vectors[r][c]));
  }
#endif
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t rest = j; rest < cols; ++rest) {
      const float x = rows.At(r, rest);
      for (size_t c = 0; c < kRanks; ++c) sums[r][c] = std::fma(x, q[c * cols + rest], sums[r][c]);
    }
    std::copy_n(sums[r], kRanks, p + r * stride);
  }
}

template <size_t kRanks, class Rows>
void ProjectTile(Rows rows, size_t count, const float* q, float* p, size_t stride) {
  constexpr size_t kRows = std::min(kTileRows, kSums / kRanks);
  size_t row = 0;
  for (; count - row >= kRows; row += kRows) {
    ProjectRows<kRanks, kRows>(rows.From(row), q, p + row * stride, stride);
  }
  for (; row < count; ++row) ProjectRows<kRanks, 1>(rows.From(row), q, p + row * stride, stride);
}

template <class Rows>
void ProjectColumns(size_t ranks, Rows rows, size_t count, const float* q, float* p,
                    size_t stride) {
  switch (ranks) {
    case 8:
      return ProjectTile<8>(rows, count, q, p, stride);
    case 4:
      return ProjectTile<4>(rows, count, q, p, stride);
    case 2:
      return ProjectTile<2>(rows, count, q, p, stride);
    default:
      return ProjectTile<1>(rows, count, q, p, stride);
  }
}

bool AllFinite(const float* values, size_t count) {
  return std::all_of(values, values + count, [](float value) { return std::isfinite(value); });
}

// Without error feedback `error` and `x` are null.
uint64_t AddErrorAndProjectForTarget(const FactorShape& block, const float* gradient,
                                     const float* error, float* x, const float* q, float* p) {
  const auto [rows, cols, rank] = block;
  uint64_t nonfinite = 0;
  for (size_t row = 0; row < rows; row += kTileRows) {
    const size_t count = std::min(kTileRows, rows - row);
    const float* g = gradient + row * cols;
    float* tile = p + row * rank;
    for (size_t c = 0; c < rank;) {
      const size_t ranks = ColumnsAtOnce(rank - c);
      if (x != nullptr && c == 0) {
        const AddedRows added{g, error + row * cols, x + row * cols, cols};
        ProjectColumns(ranks, added, count, q, tile, rank);
      } else {
        const PlainRows plain{x == nullptr ? g : x + row * cols, cols};
        ProjectColumns(ranks, plain, count, q + c * cols, tile + c, rank);
      }
      c += ranks;
    }
    // Infinity and NaN always reach P: times zero they are NaN, and no sum makes them finite again.
    if (!AllFinite(tile, count * rank)) {
      nonfinite += static_cast<uint64_t>(
          std::count_if(g, g + count * cols, [](float value) { return !std::isfinite(value); }));
    }
  }
  return nonfinite;
}

void RestoreErrorForTarget(const float* gradient, float* error, size_t elems) {
  size_t i = 0;
#if THALWEG_VECTORS
  const D d;
  const size_t lanes = hn::Lanes(d);
  for (; elems - i >= lanes; i += lanes) {
    const V g = hn::LoadU(d, gradient + i);
    const V x = hn::LoadU(d, error + i);
    const auto finite = hn::Le(hn::Abs(g), hn::Set(d, kLargest));
    hn::StoreU(hn::IfThenElse(finite, hn::Sub(x, g), x), d, error + i);
  }
#endif
  for (; i < elems; ++i) error[i] = RestoredError(gradient[i], error[i]);
}

// Adds to Q the products of up to kSummedRows rows of X and P, or sets it for the first of them.
struct TransposedBlock {
  const float* x;  // at the first row and column
  size_t rows;
  size_t cols;  // of the whole matrix: the distance of its rows, and of Q's
  const float* p;
  size_t rank;
  float* q;
  bool first;

#if THALWEG_VECTORS
  template <size_t kRanks, size_t kVectors>
  HWY_INLINE void AddVectors(size_t j) const {
    const D d;
    const size_t lanes = hn::Lanes(d);
    V sums[kRanks][kVectors];
    for (auto& column : sums) {
      for (V& sum : column) sum = hn::Zero(d);
    }
    for (size_t r = 0; r < rows; ++r) {
      V values[kVectors];
      HWY_UNROLL(8)
      for (size_t v = 0; v < kVectors; ++v) {
        values[v] = hn::LoadU(d, x + r * cols + j + v * lanes);
      }
      HWY_UNROLL(8)
      for (size_t c = 0; c < kRanks; ++c) {
        const V factor = hn::Set(d, p[r * rank + c]);
        HWY_UNROLL(8)
        for (size_t v = 0; v < kVectors; ++v) {
          sums[c][v] = hn::MulAdd(factor, values[v], sums[c][v]);
        }
      }
    }
    HWY_UNROLL(8)
    for (size_t c = 0; c < kRanks; ++c) {
      HWY_UNROLL(8)
      for (size_t v = 0; v < kVectors; ++v) {
        float* to = q + c * cols + j + v * lanes;
        hn::StoreU(first ? sums[c][v] : hn::Add(hn::LoadU(d, to), sums[c][v]), d, to);
      }
    }
  }
#endif

  void AddScalar(size_t j, size_t ranks) const {
    for (size_t c = 0; c < ranks; ++c) {
      float sum = 0;
      for (size_t r = 0; r < rows; ++r) sum = std::fma(p[r * rank + c], x[r * cols + j], sum);
      float& to = q[c * cols + j];
      to = first ? sum : to + sum;
    }
  }

  template <size_t kRanks>
  void Add(size_t width) const {
    size_t j = 0;
#if THALWEG_VECTORS
    const size_t lanes = hn::Lanes(D());
    constexpr size_t kVectors = kSums / kRanks;
    for (; width - j >= kVectors * lanes; j += kVectors * lanes) AddVectors<kRanks, kVectors>(j);
    for (; width - j >= lanes; j += lanes) AddVectors<kRanks, 1>(j);
#endif
    for (; j < width; ++j) AddScalar(j, kRanks);
  }
};

void ProjectTransposedForTarget(const FactorShape& shape, const float* x, const float* p,
                                size_t col_begin, size_t col_end, float* q) {
  const auto [rows, cols, rank] = shape;
  const size_t strip = std::max<size_t>(64, kStripFloats / rank / 64 * 64);
  for (size_t j = col_begin; j < col_end; j += strip) {
    const size_t width = std::min(strip, col_end - j);
    for (size_t row = 0; row < rows; row += kSummedRows) {
      for (size_t c = 0; c < rank;) {
        const size_t ranks = ColumnsAtOnce(rank - c);
        const TransposedBlock block{.x = x + row * cols + j,
                                    .rows = std::min<size_t>(kSummedRows, rows - row),
                                    .cols = cols,
                                    .p = p + row * rank + c,
                                    .rank = rank,
                                    .q = q + c * cols + j,
                                    .first = row == 0};
        if (ranks == 8) block.Add<8>(width);
        if (ranks == 4) block.Add<4>(width);
        if (ranks == 2) block.Add<2>(width);
        if (ranks == 1) block.Add<1>(width);
        c += ranks;
      }
    }
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace thalweg
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace thalweg {

HWY_EXPORT(AddErrorAndProjectForTarget);
HWY_EXPORT(RestoreErrorForTarget);
HWY_EXPORT(ProjectTransposedForTarget);

size_t FactorRank(size_t rows, size_t cols, size_t rank) { return std::min({rows, cols, rank}); }

bool Compresses(size_t rows, size_t cols, size_t rank, double min_rate) {
  if (rows < 2 || cols < 2) return false;
  const auto factors = static_cast<double>((rows + cols) * FactorRank(rows, cols, rank));
  return factors * min_rate < static_cast<double>(rows * cols);
}

uint64_t AddErrorAndProject(const FactorShape& block, std::span<const float> gradient,
                            std::span<const float> error, std::span<float> x,
                            std::span<const float> q, std::span<float> p) {
  assert(block.rank > 0 && gradient.size() == block.rows * block.cols);
  assert(error.size() == x.size() && (x.empty() || x.size() == gradient.size()));
  assert(q.size() == block.rank * block.cols && p.size() == block.rows * block.rank);
  return HWY_DYNAMIC_DISPATCH(AddErrorAndProjectForTarget)(
      block, gradient.data(), x.empty() ? nullptr : error.data(), x.empty() ? nullptr : x.data(),
      q.data(), p.data());
}

void RestoreError(std::span<const float> gradient, std::span<float> error) {
  assert(gradient.size() == error.size());
  HWY_DYNAMIC_DISPATCH(RestoreErrorForTarget)(gradient.data(), error.data(), error.size());
}

void ProjectTransposed(const FactorShape& shape, std::span<const float> x, std::span<const float> p,
                       size_t col_begin, size_t col_end, std::span<float> q) {
  assert(shape.rank > 0 && x.size() == shape.rows * shape.cols);
  assert(p.size() == shape.rows * shape.rank && q.size() == shape.rank * shape.cols);
  assert(col_begin <= col_end && col_end <= shape.cols);
  HWY_DYNAMIC_DISPATCH(ProjectTransposedForTarget)
  (shape, x.data(), p.data(), col_begin, col_end, q.data());
}

}  // namespace thalweg
#endif  // HWY_ONCE
