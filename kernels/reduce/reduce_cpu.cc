#include <cassert>
#include <cstddef>
#include <cstdint>

#include "kernels/reduce/reduce.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/reduce/reduce_cpu.cc"
#include "hwy/foreach_target.h"  // compiles the rest of this file once per target
#include "hwy/highway.h"
#include "kernels/cast/element.h"
#include "kernels/cast/vector-inl.h"
#include "kernels/reduce/fold_scalar.h"

HWY_BEFORE_NAMESPACE();
namespace thalweg {
namespace HWY_NAMESPACE {

// Counts the non-finite among `elems` results and replaces their NaNs by the same one.
template <class Out>
uint64_t SettleNonFinite(std::byte* out, size_t elems) {
  uint64_t count = 0;
  for (size_t i = 0; i < elems; ++i) {
    const typename Out::Bits bits = LoadBits<Out>(out, i);
    if (IsFinite<Out>(bits)) continue;
    ++count;
    StoreBits<Out>(SettleNaN<Out>(bits), out, i);
  }
  return count;
}

// A Folder does one fold: it has FoldMean's arguments, for element types In and Out.
template <class In, class Out>
class Folder {
 public:
  Folder(const void* const* inputs, const float* weights, size_t count, float divisor, void* out)
      : inputs_(inputs),
        weights_(weights),
        count_(count),
        divisor_(divisor),
        out_(static_cast<std::byte*>(out)) {}

  uint64_t Fold(size_t elems) const {
    uint64_t nonfinite = 0;
    size_t i = 0;
#if THALWEG_VECTORS
    const size_t lanes = hn::Lanes(D());
    for (; elems - i >= 4 * lanes; i += 4 * lanes) nonfinite += FoldFour(i);
    for (; elems - i >= lanes; i += lanes) nonfinite += FoldOne(i);
#endif
    for (; i < elems; ++i) nonfinite += FoldScalar(i);
    return nonfinite;
  }

 private:
  using Accumulator = typename In::Accumulator;

  std::byte* At(size_t i) const { return out_ + i * sizeof(typename Out::Bits); }

  uint64_t FoldScalar(size_t i) const {
    Accumulator sum = FoldFirst<In>(weights_[0], LoadBits<In>(inputs_[0], i));
    for (size_t k = 1; k < count_; ++k) {
      sum = FoldNext<In>(weights_[k], LoadBits<In>(inputs_[k], i), sum);
    }
    const typename Out::Bits bits = FoldLast<Out>(sum / divisor_);
    StoreBits<Out>(bits, out_, i);
    return IsFinite<Out>(bits) ? 0 : 1;
  }

#if THALWEG_VECTORS
  using D = hn::ScalableTag<Accumulator>;
  using V = hn::Vec<D>;

  Accumulator Weight(size_t k) const { return static_cast<Accumulator>(weights_[k]); }

  const std::byte* At(size_t k, size_t i) const {
    return static_cast<const std::byte*>(inputs_[k]) + i * sizeof(typename In::Bits);
  }

  HWY_INLINE uint64_t FoldOne(size_t i) const {
    const D d;
    V sum = hn::Mul(hn::Set(d, Weight(0)), LoadVector(In{}, d, At(0, i)));
    for (size_t k = 1; k < count_; ++k) {
      sum = hn::MulAdd(hn::Set(d, Weight(k)), LoadVector(In{}, d, At(k, i)), sum);
    }
    if (divisor_ != 1.0f) sum = hn::Div(sum, hn::Set(d, static_cast<Accumulator>(divisor_)));
    StoreVector(Out{}, d, sum, At(i));
    if (hn::AllTrue(d, StaysFinite(sum))) return 0;
    return SettleNonFinite<Out>(At(i), hn::Lanes(d));
  }

  // Folds four vectors at once, so that the other chains of additions hide the latency of each.
  // They are named one by one because vectors whose length the compiler does not know cannot form
  // an array.
  HWY_INLINE uint64_t FoldFour(size_t i) const {
    const D d;
    const size_t lanes = hn::Lanes(d);
    const size_t stride = lanes * sizeof(typename In::Bits);
    V weight = hn::Set(d, Weight(0));
    const std::byte* in = At(0, i);
    V sum0 = hn::Mul(weight, LoadVector(In{}, d, in));
    V sum1 = hn::Mul(weight, LoadVector(In{}, d, in + stride));
    V sum2 = hn::Mul(weight, LoadVector(In{}, d, in + 2 * stride));
    V sum3 = hn::Mul(weight, LoadVector(In{}, d, in + 3 * stride));
    for (size_t k = 1; k < count_; ++k) {
      weight = hn::Set(d, Weight(k));
      in = At(k, i);
      sum0 = hn::MulAdd(weight, LoadVector(In{}, d, in), sum0);
      sum1 = hn::MulAdd(weight, LoadVector(In{}, d, in + stride), sum1);
      sum2 = hn::MulAdd(weight, LoadVector(In{}, d, in + 2 * stride), sum2);
      sum3 = hn::MulAdd(weight, LoadVector(In{}, d, in + 3 * stride), sum3);
    }
    if (divisor_ != 1.0f) {
      const V divisor = hn::Set(d, static_cast<Accumulator>(divisor_));
      sum0 = hn::Div(sum0, divisor);
      sum1 = hn::Div(sum1, divisor);
      sum2 = hn::Div(sum2, divisor);
      sum3 = hn::Div(sum3, divisor);
    }
    StoreVector(Out{}, d, sum0, At(i));
    StoreVector(Out{}, d, sum1, At(i + lanes));
    StoreVector(Out{}, d, sum2, At(i + 2 * lanes));
    StoreVector(Out{}, d, sum3, At(i + 3 * lanes));
    const auto finite = hn::And(hn::And(StaysFinite(sum0), StaysFinite(sum1)),
                                hn::And(StaysFinite(sum2), StaysFinite(sum3)));
    if (hn::AllTrue(d, finite)) return 0;
    return SettleNonFinite<Out>(At(i), 4 * lanes);
  }

  // Returns which of `sums` are finite as Out. A comparison with NaN is false.
  static HWY_INLINE hn::Mask<D> StaysFinite(V sums) {
    const D d;
    return hn::Lt(hn::Abs(sums), hn::Set(d, static_cast<Accumulator>(Out::kOverflow)));
  }
#endif  // THALWEG_VECTORS

  const void* const* inputs_;
  const float* weights_;
  size_t count_;
  float divisor_;
  std::byte* out_;
};

uint64_t FoldForTarget(const void* const* inputs, const float* weights, size_t count, float divisor,
                       DType in, DType out_type, void* out, size_t elems) {
  switch (in) {
    case DType::kFloat32:
      if (out_type == DType::kFloat16) {
        return Folder<Fp32, Fp16>(inputs, weights, count, divisor, out).Fold(elems);
      }
      if (out_type == DType::kBFloat16) {
        return Folder<Fp32, BFloat16>(inputs, weights, count, divisor, out).Fold(elems);
      }
      return Folder<Fp32, Fp32>(inputs, weights, count, divisor, out).Fold(elems);
    case DType::kFloat16:
      return Folder<Fp16, Fp16>(inputs, weights, count, divisor, out).Fold(elems);
    case DType::kBFloat16:
      return Folder<BFloat16, BFloat16>(inputs, weights, count, divisor, out).Fold(elems);
    case DType::kFloat64:
      return Folder<Fp64, Fp64>(inputs, weights, count, divisor, out).Fold(elems);
    default:
      return 0;  // gradients are floats
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace thalweg
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace thalweg {

HWY_EXPORT(FoldForTarget);

uint64_t FoldMean(std::span<const void* const> inputs, std::span<const float> weights,
                  float divisor, DType in, DType out_type, void* out, size_t elems) {
  assert(!inputs.empty() && weights.size() == inputs.size());
  assert(divisor > 0.0f);
  assert(in == out_type || (in == DType::kFloat32 && SizeOf(out_type) == 2));
  if (elems == 0) return 0;  // the pointers may be null then
  return HWY_DYNAMIC_DISPATCH(FoldForTarget)(inputs.data(), weights.data(), inputs.size(), divisor,
                                             in, out_type, out, elems);
}

}  // namespace thalweg
#endif  // HWY_ONCE
