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
#define HWY_TARGET_INCLUDE "kernels/codec/powersgd/reconstruct_cpu.cc"
#include "hwy/foreach_target.h"  // compiles the rest of this file once per target
#include "hwy/highway.h"
#include "kernels/cast/element.h"
#include "kernels/cast/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace thalweg {
namespace HWY_NAMESPACE {

#if THALWEG_VECTORS
using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;

constexpr float kLargest = std::numeric_limits<float>::max();

// This many sums are kept in registers at once: half of the 16 of AVX2.
constexpr size_t kSums = 8;
#endif

// Counts the non-finite among `elems` results and replaces every NaN by the same one, as a fold
// does.
uint64_t SettleNonFinite(float* out, size_t elems) {
  uint64_t count = 0;
  for (size_t i = 0; i < elems; ++i) {
    if (!std::isfinite(out[i])) ++count;
    if (std::isnan(out[i])) out[i] = BitCast<float>(Fp32::kNan);
  }
  return count;
}

// ProductRows does pass 3 from one row on. It does not use stores that bypass the cache:
// interleaved with the other stores they take almost twice as long.
template <bool kFeedback>
struct ProductRows {
  size_t cols;
  size_t rank;
  const float* p;
  const float* q;
  float* error;
  float* out;

#if THALWEG_VECTORS
  // Returns whether the results are finite.
  template <size_t kRows, size_t kVectors>
  HWY_INLINE bool Vectors(size_t j) const {
    const D d;
    const size_t lanes = hn::Lanes(d);
    V sums[kRows][kVectors];
    HWY_UNROLL(8)
    for (size_t v = 0; v < kVectors; ++v) {
      const V factor = hn::LoadU(d, q + j + v * lanes);
      HWY_UNROLL(8)
      for (size_t r = 0; r < kRows; ++r) sums[r][v] = hn::Mul(hn::Set(d, p[r * rank]), factor);
    }
    for (size_t c = 1; c < rank; ++c) {
      HWY_UNROLL(8)
      for (size_t v = 0; v < kVectors; ++v) {
        const V factor = hn::LoadU(d, q + c * cols + j + v * lanes);
        HWY_UNROLL(8)
        for (size_t r = 0; r < kRows; ++r) {
          sums[r][v] = hn::MulAdd(hn::Set(d, p[r * rank + c]), factor, sums[r][v]);
        }
      }
    }
    auto finite = hn::Eq(hn::Zero(d), hn::Zero(d));
    HWY_UNROLL(8)
    for (size_t r = 0; r < kRows; ++r) {
      HWY_UNROLL(8)
      for (size_t v = 0; v < kVectors; ++v) {
        Store(r * cols + j + v * lanes, sums[r][v]);
        finite = hn::And(finite, hn::Le(hn::Abs(sums[r][v]), hn::Set(d, kLargest)));
      }
    }
    return hn::AllTrue(d, finite);
  }

  HWY_INLINE void Store(size_t at, V result) const {
    const D d;
    if constexpr (kFeedback) {
      const V x = hn::LoadU(d, error + at);
      const V left = hn::Sub(x, result);
      const auto finite = hn::Le(hn::Abs(left), hn::Set(d, kLargest));
      hn::StoreU(hn::IfThenElse(finite, left, x), d, error + at);
    }
    hn::StoreU(result, d, out + at);
  }
#endif

  bool Scalar(size_t row, size_t j) const {
    float sum = p[row * rank] * q[j];
    for (size_t c = 1; c < rank; ++c) sum = std::fma(p[row * rank + c], q[c * cols + j], sum);
    const size_t at = row * cols + j;
    if constexpr (kFeedback) error[at] = ErrorAfter(error[at], sum);
    out[at] = sum;
    return std::isfinite(sum);
  }

  template <size_t kRows>
  uint64_t Compute() const {
    size_t j = 0;
    bool finite = true;
#if THALWEG_VECTORS
    const size_t lanes = hn::Lanes(D());
    constexpr size_t kVectors = kSums / kRows;
    for (; cols - j >= kVectors * lanes; j += kVectors * lanes) {
      finite &= Vectors<kRows, kVectors>(j);
    }
    for (; cols - j >= lanes; j += lanes) finite &= Vectors<kRows, 1>(j);
#endif
    for (; j < cols; ++j) {
      for (size_t r = 0; r < kRows; ++r) finite &= Scalar(r, j);
    }
    return finite ? 0 : SettleNonFinite(out, kRows * cols);
  }
};

template <bool kFeedback>
uint64_t ReconstructRows(const FactorShape& block, const float* p, const float* q, float* error,
                         float* out) {
  uint64_t nonfinite = 0;
  for (size_t row = 0; row < block.rows; row += 2) {
    const size_t first = row * block.cols;
    const ProductRows<kFeedback> rows = {.cols = block.cols,
                                         .rank = block.rank,
                                         .p = p + row * block.rank,
                                         .q = q,
                                         .error = kFeedback ? error + first : nullptr,
                                         .out = out + first};
    nonfinite += block.rows - row >= 2 ? rows.template Compute<2>() : rows.template Compute<1>();
  }
  return nonfinite;
}

uint64_t ReconstructForTarget(const FactorShape& block, const float* p, const float* q,
                              float* error, float* out) {
  return error == nullptr ? ReconstructRows<false>(block, p, q, error, out)
                          : ReconstructRows<true>(block, p, q, error, out);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace thalweg
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace thalweg {

HWY_EXPORT(ReconstructForTarget);

uint64_t Reconstruct(const FactorShape& block, std::span<const float> p, std::span<const float> q,
                     std::span<float> error, std::span<float> out) {
  assert(block.rank > 0 && out.size() == block.rows * block.cols);
  assert(error.empty() || error.size() == out.size());
  assert(q.size() == block.rank * block.cols && p.size() == block.rows * block.rank);
  return HWY_DYNAMIC_DISPATCH(ReconstructForTarget)(
      block, p.data(), q.data(), error.empty() ? nullptr : error.data(), out.data());
}

}  // namespace thalweg
#endif  // HWY_ONCE
