#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "kernels/codec/onebit/onebit.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/codec/onebit/onebit_cpu.cc"
#include "hwy/foreach_target.h"  // compiles the rest of this file once per target
#include "hwy/highway.h"
#include "kernels/cast/element.h"
#include "kernels/codec/blocks-inl.h"
#include "kernels/codec/onebit/hadamard-inl.h"
#include "kernels/codec/onebit/onebit_scalar.h"
#include "kernels/codec/onebit/rotation.h"

HWY_BEFORE_NAMESPACE();
namespace thalweg {
namespace HWY_NAMESPACE {
namespace {

// Vectors have at most 8 elements, so that the partial sums fill whole vectors.
using D = hn::CappedTag<float, 8>;
using V = hn::Vec<D>;

constexpr float kLargest = std::numeric_limits<float>::max();

float SumOf(float* partials) {
  for (size_t half = kOneBitPartials / 2; half > 0; half /= 2) {
    for (size_t j = 0; j < half; ++j) partials[j] += partials[j + half];
  }
  return partials[0];
}

template <Residuals kResiduals>
uint64_t EncodeNaNBlock(const float* values, Feedback feedback, size_t elems, std::byte* out) {
  StoreBits<Fp32>(Fp32::kNan, out, 0);
  std::memset(out + sizeof(float), 0, (elems + 7) / 8);
  uint64_t nonfinite = 0;
  for (size_t i = 0; i < elems; ++i) {
    if (!std::isfinite(Sum<kResiduals>(values, feedback, i))) ++nonfinite;
  }
  if (kResiduals != Residuals::kNone && feedback.next != feedback.last) {
    std::copy_n(feedback.last, elems, feedback.next);
  }
  return nonfinite;
}

// The following functions handle the last block of a chunk, which is not rotated.

template <Residuals kResiduals>
uint64_t EncodeShortBlock(const float* values, Feedback feedback, size_t elems, std::byte* out) {
  float partials[kOneBitPartials] = {};
  for (size_t i = 0; i < elems; ++i) {
    const float x = Sum<kResiduals>(values, feedback, i);
    float& partial = partials[i % kOneBitPartials];
    partial = AddToOneBitPartial(std::fabs(x), partial);
  }
  const float sum = SumOf(partials);
  if (!std::isfinite(sum)) return EncodeNaNBlock<kResiduals>(values, feedback, elems, out);
  const float scale = ShortOneBitScale(sum, elems);
  StoreBits<Fp32>(BitCast<uint32_t>(scale), out, 0);
  std::byte* const signs = out + sizeof(float);
  std::memset(signs, 0, (elems + 7) / 8);
  for (size_t i = 0; i < elems; ++i) {
    const float x = Sum<kResiduals>(values, feedback, i);
    if (x < 0) signs[i / 8] |= std::byte{1} << (i % 8);
    if (kResiduals != Residuals::kNone) feedback.next[i] = ShortOneBitResidual(x, scale);
  }
  return 0;
}

void DecodeShortBlock(const std::byte* in, size_t elems, float* out) {
  const uint32_t scale = LoadBits<Fp32>(in, 0);
  const std::byte* const signs = in + sizeof(float);
  for (size_t i = 0; i < elems; ++i) {
    const auto sign = std::to_integer<uint32_t>(signs[i / 8] >> (i % 8)) & 1u;
    out[i] = DecodeShortOneBit(sign, scale);
  }
}

// The following functions handle whole blocks.

template <Residuals kResiduals>
HWY_INLINE V LoadSum(const float* values, Feedback feedback, size_t i) {
  const D d;
  const V x = hn::LoadU(d, values + i);
  if constexpr (kResiduals != Residuals::kNone) return hn::Add(x, hn::LoadU(d, feedback.last + i));
  return x;
}

HWY_INLINE V Flip(V v, size_t i) {
  const D d;
  const hn::RebindToUnsigned<D> bits;
  return hn::Xor(v, hn::BitCast(d, hn::LoadU(bits, &kRotationFlips[i])));
}

template <Residuals kResiduals>
HWY_INLINE void Rotate(const float* values, Feedback feedback, float* rotated) {
  const D d;
  const V shrink = hn::Set(d, kRotationShrink);
  for (size_t i = 0; i < kOneBitBlockElems; i += hn::Lanes(d)) {
    const V x = LoadSum<kResiduals>(values, feedback, i);
    hn::StoreU(hn::Mul(Flip(x, i), shrink), d, rotated + i);
  }
  Hadamard(rotated);
}

HWY_INLINE float SumOfMagnitudes(const float* rotated) {
  const D d;
  float partials[kOneBitPartials];
  for (size_t j = 0; j < kOneBitPartials; j += hn::Lanes(d)) {
    V sum = hn::Zero(d);
    for (size_t i = j; i < kOneBitBlockElems; i += kOneBitPartials) {
      sum = hn::Add(sum, hn::Abs(hn::LoadU(d, rotated + i)));
    }
    hn::StoreU(sum, d, partials + j);
  }
  return SumOf(partials);
}

// Stores the signs as bits, and replaces the elements by ±1.
HWY_INLINE void TakeSigns(float* rotated, std::byte* signs) {
  const D d;
  const V plus = hn::Set(d, 1.0f);
  const V minus = hn::Set(d, -1.0f);
  for (size_t word = 0; word < kOneBitBlockElems / 32; ++word) {
    uint32_t bits = 0;
    for (size_t j = 0; j < 32; j += hn::Lanes(d)) {
      float* const at = rotated + word * 32 + j;
      const auto negative = hn::Lt(hn::LoadU(d, at), hn::Zero(d));
      uint64_t mask = 0;  // eight bytes, the most that may be written
      hn::StoreMaskBits(d, negative, reinterpret_cast<uint8_t*>(&mask));
      bits |= static_cast<uint32_t>(mask & ((1u << hn::Lanes(d)) - 1)) << j;
      hn::StoreU(hn::IfThenElse(negative, minus, plus), d, at);
    }
    StoreBits<Fp32>(bits, signs, word);
  }
}

// Replaces the ±1 at `signs` by what they decode to.
HWY_INLINE void RotateBack(float scale, float* signs) {
  const D d;
  const V factor = hn::Set(d, scale);
  Hadamard(signs);
  for (size_t i = 0; i < kOneBitBlockElems; i += hn::Lanes(d)) {
    hn::StoreU(hn::Mul(Flip(hn::LoadU(d, signs + i), i), factor), d, signs + i);
  }
}

template <Residuals kResiduals>
uint64_t EncodeBlock(const float* values, Feedback feedback, std::byte* out) {
  const D d;
  alignas(64) float rotated[kOneBitBlockElems];
  Rotate<kResiduals>(values, feedback, rotated);
  const float sum = SumOfMagnitudes(rotated);
  if (!std::isfinite(sum)) {
    return EncodeNaNBlock<kResiduals>(values, feedback, kOneBitBlockElems, out);
  }
  const float scale = WholeOneBitScale(sum);
  StoreBits<Fp32>(BitCast<uint32_t>(scale), out, 0);
  TakeSigns(rotated, out + sizeof(float));
  if constexpr (kResiduals != Residuals::kNone) {
    RotateBack(scale, rotated);
    const V largest = hn::Set(d, kLargest);
    for (size_t i = 0; i < kOneBitBlockElems; i += hn::Lanes(d)) {
      const V x = LoadSum<kResiduals>(values, feedback, i);
      const V left = hn::Sub(x, hn::LoadU(d, rotated + i));
      // The clamp keeps the residual finite where two of the largest floats are subtracted.
      StoreResidual<kResiduals>(hn::Max(hn::Min(left, largest), hn::Neg(largest)), d,
                                feedback.next + i);
    }
  }
  return 0;
}

void DecodeBlock(const std::byte* in, float* out) {
  const D d;
  const hn::RebindToUnsigned<D> bits;
  const auto one = hn::Set(bits, BitCast<uint32_t>(1.0f));
  const auto sign_bit = hn::Set(bits, ~Fp32::kMagnitude);
  // Bit k of a word becomes the sign of lane k.
  for (size_t word = 0; word < kOneBitBlockElems / 32; ++word) {
    const uint32_t word_bits = LoadBits<Fp32>(in + sizeof(float), word);
    for (size_t j = 0; j < 32; j += hn::Lanes(d)) {
      const auto shift = hn::Sub(hn::Set(bits, 31u), hn::Iota(bits, 0));
      const auto sign = hn::And(hn::Shl(hn::Set(bits, word_bits >> j), shift), sign_bit);
      hn::StoreU(hn::BitCast(d, hn::Xor(one, sign)), d, out + word * 32 + j);
    }
  }
  RotateBack(BitCast<float>(LoadBits<Fp32>(in, 0)), out);
}

struct OneBitBlock {
  static constexpr WireFormat kFormat = WireFormat::kOneBit;

  template <Residuals kResiduals>
  static HWY_INLINE uint64_t Encode(const float* values, Feedback feedback, size_t elems,
                                    std::byte* out) {
    if (elems == kOneBitBlockElems) return EncodeBlock<kResiduals>(values, feedback, out);
    return EncodeShortBlock<kResiduals>(values, feedback, elems, out);
  }

  static HWY_INLINE void Decode(const std::byte* in, size_t elems, float* out) {
    if ((LoadBits<Fp32>(in, 0) & Fp32::kMagnitude) >= Fp32::kInfinity) {
      std::fill_n(out, elems, Fp32::Widen(Fp32::kNan));
    } else if (elems == kOneBitBlockElems) {
      DecodeBlock(in, out);
    } else {
      DecodeShortBlock(in, elems, out);
    }
  }
};

uint64_t EncodeOneBitForTarget(const float* values, Feedback feedback, size_t elems,
                               std::byte* out) {
  return EncodeEveryBlock<OneBitBlock>(values, feedback, elems, out);
}

void DecodeOneBitForTarget(const std::byte* in, size_t elems, float* out) {
  DecodeEveryBlock<OneBitBlock>(in, elems, out);
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace thalweg
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace thalweg {

HWY_EXPORT(EncodeOneBitForTarget);
HWY_EXPORT(DecodeOneBitForTarget);

uint64_t EncodeOneBit(const float* values, Feedback feedback, size_t elems, std::byte* out) {
  return HWY_DYNAMIC_DISPATCH(EncodeOneBitForTarget)(values, feedback, elems, out);
}

void DecodeOneBit(const std::byte* in, size_t elems, float* out) {
  HWY_DYNAMIC_DISPATCH(DecodeOneBitForTarget)(in, elems, out);
}

}  // namespace thalweg
#endif  // HWY_ONCE
