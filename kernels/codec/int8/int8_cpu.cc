#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/base/wire_format.h"
#include "kernels/codec/int8/int8.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/codec/int8/int8_cpu.cc"
#include "hwy/foreach_target.h"  // compiles the rest of this file once per target
#include "hwy/highway.h"
#include "kernels/cast/element.h"
#include "kernels/cast/vector-inl.h"
#include "kernels/codec/blocks-inl.h"
#include "kernels/codec/int8/int8_scalar.h"

HWY_BEFORE_NAMESPACE();
namespace thalweg {
namespace HWY_NAMESPACE {
namespace {

// Encodes one block with any contents.
template <Residuals kResiduals>
uint64_t EncodeAnyBlock(const float* values, Feedback feedback, size_t elems, std::byte* out) {
  uint32_t largest = 0;
  uint64_t nonfinite = 0;
  for (size_t i = 0; i < elems; ++i) {
    const float x = Sum<kResiduals>(values, feedback, i);
    const uint32_t magnitude = BitCast<uint32_t>(x) & Fp32::kMagnitude;
    if (magnitude < Fp32::kInfinity) {
      largest = std::max(largest, magnitude);
    } else {
      ++nonfinite;
    }
  }
  const Int8Scale scale = Int8ScaleOf(largest);
  StoreBits<Fp32>(BitCast<uint32_t>(scale.value), out, 0);
  auto* codes = reinterpret_cast<int8_t*>(out + sizeof(float));
  for (size_t i = 0; i < elems; ++i) {
    const float x = Sum<kResiduals>(values, feedback, i);
    if constexpr (kResiduals == Residuals::kNone) {
      codes[i] = EncodeInt8Element(x, scale, nullptr);
    } else {
      feedback.next[i] = feedback.last[i];
      codes[i] = EncodeInt8Element(x, scale, &feedback.next[i]);
    }
  }
  return nonfinite;
}

void DecodeAnyBlock(const std::byte* in, size_t elems, float* out) {
  const float scale = Fp32::Widen(LoadBits<Fp32>(in, 0));
  const auto* codes = reinterpret_cast<const int8_t*>(in + sizeof(float));
  for (size_t i = 0; i < elems; ++i) out[i] = DecodeInt8Element(codes[i], scale);
}

#if THALWEG_VECTORS

using D = hn::ScalableTag<float>;
using D32 = hn::RebindToSigned<D>;

template <Residuals kResiduals>
HWY_INLINE hn::Vec<D> LoadSum(const float* values, Feedback feedback, size_t i) {
  const D d;
  const auto x = hn::LoadU(d, values + i);
  if constexpr (kResiduals != Residuals::kNone) return hn::Add(x, hn::LoadU(d, feedback.last + i));
  return x;
}

// Returns the bits of the largest |x|. Those of infinity and NaN are larger than all others.
template <Residuals kResiduals>
HWY_INLINE uint32_t LargestMagnitude(const float* values, Feedback feedback) {
  const D d;
  const D32 d32;
  const size_t lanes = hn::Lanes(d);
  auto even = hn::Zero(d32);
  auto odd = hn::Zero(d32);
  for (size_t i = 0; i < kInt8BlockElems; i += 2 * lanes) {
    const auto x0 = hn::Abs(LoadSum<kResiduals>(values, feedback, i));
    const auto x1 = hn::Abs(LoadSum<kResiduals>(values, feedback, i + lanes));
    even = hn::Max(even, hn::BitCast(d32, x0));
    odd = hn::Max(odd, hn::BitCast(d32, x1));
  }
  return static_cast<uint32_t>(hn::GetLane(hn::MaxOfLanes(d32, hn::Max(even, odd))));
}

template <Residuals kResiduals>
HWY_INLINE uint64_t EncodeBlock(const float* values, Feedback feedback, std::byte* out) {
  const uint32_t largest = LargestMagnitude<kResiduals>(values, feedback);
  if (largest >= Fp32::kInfinity) {
    return EncodeAnyBlock<kResiduals>(values, feedback, kInt8BlockElems, out);
  }
  const D d;
  const D32 d32;
  const hn::Rebind<int8_t, D> d8;
  const Int8Scale scale = Int8ScaleOf(largest);
  StoreBits<Fp32>(BitCast<uint32_t>(scale.value), out, 0);
  auto* codes = reinterpret_cast<int8_t*>(out + sizeof(float));
  const auto inverse = hn::Set(d, scale.inverse);
  const auto value = hn::Set(d, scale.value);
  const auto rounder = hn::Set(d, kInt8Rounder);
  const auto rounder_bits = hn::BitCast(d32, rounder);
  for (size_t i = 0; i < kInt8BlockElems; i += hn::Lanes(d)) {
    const auto x = LoadSum<kResiduals>(values, feedback, i);
    const auto sum = hn::MulAdd(x, inverse, rounder);
    hn::StoreU(hn::DemoteTo(d8, hn::Sub(hn::BitCast(d32, sum), rounder_bits)), d8, codes + i);
    if constexpr (kResiduals != Residuals::kNone) {
      StoreResidual<kResiduals>(hn::Sub(x, hn::Mul(hn::Sub(sum, rounder), value)), d,
                                feedback.next + i);
    }
  }
  return 0;
}

// Returns whether all codes of a full block are numbers.
HWY_INLINE bool AllNumbers(const int8_t* codes) {
  const hn::ScalableTag<uint8_t> d;
  // The addition maps -125 … 125 to 0 … 250, and the rest to 251 … 255.
  const auto offset = hn::Set(d, static_cast<uint8_t>(kInt8LargestCode));
  auto largest = hn::Zero(d);
  for (size_t i = 0; i < kInt8BlockElems; i += hn::Lanes(d)) {
    const auto code = hn::LoadU(d, reinterpret_cast<const uint8_t*>(codes + i));
    largest = hn::Max(largest, hn::Add(code, offset));
  }
  const auto limit = hn::Set(d, static_cast<uint8_t>(2 * kInt8LargestCode));
  return hn::AllTrue(d, hn::Eq(hn::Max(largest, limit), limit));
}

HWY_INLINE void DecodeBlock(const std::byte* in, float* out) {
  const float scale = Fp32::Widen(LoadBits<Fp32>(in, 0));
  const auto* codes = reinterpret_cast<const int8_t*>(in + sizeof(float));
  if (!std::isfinite(scale) || !AllNumbers(codes)) {
    return DecodeAnyBlock(in, kInt8BlockElems, out);
  }
  const D d;
  const D32 d32;
  const hn::Rebind<int8_t, D> d8;
  const auto value = hn::Set(d, scale);
  for (size_t i = 0; i < kInt8BlockElems; i += hn::Lanes(d)) {
    const auto code = hn::ConvertTo(d, hn::PromoteTo(d32, hn::LoadU(d8, codes + i)));
    hn::StoreU(hn::Mul(code, value), d, out + i);
  }
}

#endif  // THALWEG_VECTORS

struct Int8Block {
  static constexpr WireFormat kFormat = WireFormat::kInt8;

  template <Residuals kResiduals>
  static HWY_INLINE uint64_t Encode(const float* values, Feedback feedback, size_t elems,
                                    std::byte* out) {
#if THALWEG_VECTORS
    if (elems == kInt8BlockElems) return EncodeBlock<kResiduals>(values, feedback, out);
#endif
    return EncodeAnyBlock<kResiduals>(values, feedback, elems, out);
  }

  static HWY_INLINE void Decode(const std::byte* in, size_t elems, float* out) {
#if THALWEG_VECTORS
    if (elems == kInt8BlockElems) return DecodeBlock(in, out);
#endif
    DecodeAnyBlock(in, elems, out);
  }
};

uint64_t EncodeInt8ForTarget(const float* values, Feedback feedback, size_t elems, std::byte* out) {
  return EncodeEveryBlock<Int8Block>(values, feedback, elems, out);
}

void DecodeInt8ForTarget(const std::byte* in, size_t elems, float* out) {
  DecodeEveryBlock<Int8Block>(in, elems, out);
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace thalweg
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace thalweg {

HWY_EXPORT(EncodeInt8ForTarget);
HWY_EXPORT(DecodeInt8ForTarget);

uint64_t EncodeInt8(const float* values, Feedback feedback, size_t elems, std::byte* out) {
  return HWY_DYNAMIC_DISPATCH(EncodeInt8ForTarget)(values, feedback, elems, out);
}

void DecodeInt8(const std::byte* in, size_t elems, float* out) {
  HWY_DYNAMIC_DISPATCH(DecodeInt8ForTarget)(in, elems, out);
}

}  // namespace thalweg
#endif  // HWY_ONCE
