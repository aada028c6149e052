#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "core/base/wire_format.h"
#include "kernels/codec/onebit.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/codec/onebit_cpu.cc"
#include "hwy/foreach_target.h"  // compiles the rest of this file once per target
#include "hwy/highway.h"
#include "kernels/cast/element.h"
#include "kernels/cast/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace thalweg {
namespace HWY_NAMESPACE {
namespace {

// The sum of a block is kept in this many partial ones, element i in number i mod 16, so that it is
// the same for vectors of any length.
constexpr size_t kPartials = 16;

// Every magnitude is scaled while it is added, so that no sum of 1024 overflows.
constexpr float kShrink = 0x1p-11f;

float SumOf(float* partials) {
  for (size_t half = kPartials / 2; half > 0; half /= 2) {
    for (size_t j = 0; j < half; ++j) partials[j] += partials[j + half];
  }
  return partials[0];
}

// From the shrunken sum of `elems` magnitudes. Rounding could take the mean of the very largest
// floats beyond them.
float ScaleOf(float sum, size_t elems) {
  return std::min(sum / (static_cast<float>(elems) * kShrink), std::numeric_limits<float>::max());
}

// Encodes one block in which anything may occur.
template <bool kFeedback>
uint64_t EncodeAnyBlock(const float* values, float* residual, size_t elems, std::byte* out) {
  float partials[kPartials] = {};
  uint64_t nonfinite = 0;
  for (size_t i = 0; i < elems; ++i) {
    const float x = kFeedback ? values[i] + residual[i] : values[i];
    if (!std::isfinite(x)) ++nonfinite;
    partials[i % kPartials] = std::fma(std::fabs(x), kShrink, partials[i % kPartials]);
  }
  std::byte* const signs = out + sizeof(float);
  std::memset(signs, 0, (elems + 7) / 8);
  if (nonfinite > 0) {
    StoreBits<Fp32>(Fp32::kNan, out, 0);
    return nonfinite;
  }
  const float scale = ScaleOf(SumOf(partials), elems);
  StoreBits<Fp32>(BitCast<uint32_t>(scale), out, 0);
  for (size_t i = 0; i < elems; ++i) {
    const float x = kFeedback ? values[i] + residual[i] : values[i];
    if (x < 0) signs[i / 8] |= std::byte{1} << (i % 8);
    if (kFeedback) residual[i] = x - (x < 0 ? -scale : scale);
  }
  return 0;
}

void DecodeAnyBlock(const std::byte* in, size_t elems, float* out) {
  const uint32_t scale = LoadBits<Fp32>(in, 0);
  if ((scale & Fp32::kMagnitude) >= Fp32::kInfinity) {
    std::fill_n(out, elems, Fp32::Widen(Fp32::kNan));
    return;
  }
  const std::byte* const signs = in + sizeof(float);
  for (size_t i = 0; i < elems; ++i) {
    const auto sign = std::to_integer<uint32_t>(signs[i / 8] >> (i % 8)) & 1u;
    out[i] = BitCast<float>(scale ^ (sign << 31));
  }
}

#if THALWEG_VECTORS

constexpr size_t kWordElems = 32;

// Vectors of at most 8, so that the partial sums fill at least two of them.
using D = hn::CappedTag<float, kPartials / 2>;
using DBits = hn::RebindToUnsigned<D>;

template <bool kFeedback>
HWY_INLINE hn::Vec<D> LoadSum(const float* values, const float* residual, size_t i) {
  const D d;
  const auto x = hn::LoadU(d, values + i);
  if constexpr (kFeedback) return hn::Add(x, hn::LoadU(d, residual + i));
  return x;
}

template <bool kFeedback>
HWY_INLINE float ShrunkenSum(const float* values, const float* residual) {
  const D d;
  const size_t lanes = hn::Lanes(d);
  const auto shrink = hn::Set(d, kShrink);
  float partials[kPartials];
  for (size_t j = 0; j < kPartials; j += 2 * lanes) {
    auto sum0 = hn::Zero(d);
    auto sum1 = hn::Zero(d);
    for (size_t i = j; i < kOneBitBlockElems; i += kPartials) {
      const auto x0 = LoadSum<kFeedback>(values, residual, i);
      const auto x1 = LoadSum<kFeedback>(values, residual, i + lanes);
      sum0 = hn::MulAdd(hn::Abs(x0), shrink, sum0);
      sum1 = hn::MulAdd(hn::Abs(x1), shrink, sum1);
    }
    hn::StoreU(sum0, d, partials + j);
    hn::StoreU(sum1, d, partials + j + lanes);
  }
  return SumOf(partials);
}

HWY_INLINE uint32_t BitsOf(hn::Mask<D> mask) {
  const D d;
  uint64_t bits = 0;  // eight bytes, as many as may be written
  hn::StoreMaskBits(d, mask, reinterpret_cast<uint8_t*>(&bits));
  return static_cast<uint32_t>(bits) & ((1u << hn::Lanes(d)) - 1);
}

template <bool kFeedback>
HWY_INLINE uint64_t EncodeBlock(const float* values, float* residual, std::byte* out) {
  const float sum = ShrunkenSum<kFeedback>(values, residual);
  if (!std::isfinite(sum)) {
    return EncodeAnyBlock<kFeedback>(values, residual, kOneBitBlockElems, out);
  }
  const D d;
  const float scale = ScaleOf(sum, kOneBitBlockElems);
  StoreBits<Fp32>(BitCast<uint32_t>(scale), out, 0);
  std::byte* const signs = out + sizeof(float);
  const auto plus = hn::Set(d, scale);
  const auto minus = hn::Set(d, -scale);
  for (size_t word = 0; word < kOneBitBlockElems / kWordElems; ++word) {
    uint32_t bits = 0;
    for (size_t j = 0; j < kWordElems; j += hn::Lanes(d)) {
      const size_t i = word * kWordElems + j;
      const auto x = LoadSum<kFeedback>(values, residual, i);
      const auto negative = hn::Lt(x, hn::Zero(d));
      bits |= BitsOf(negative) << j;
      if constexpr (kFeedback) {
        hn::StoreU(hn::Sub(x, hn::IfThenElse(negative, minus, plus)), d, residual + i);
      }
    }
    StoreBits<Fp32>(bits, signs, word);
  }
  return 0;
}

HWY_INLINE void DecodeBlock(const std::byte* in, float* out) {
  const uint32_t scale = LoadBits<Fp32>(in, 0);
  if ((scale & Fp32::kMagnitude) >= Fp32::kInfinity) {
    return DecodeAnyBlock(in, kOneBitBlockElems, out);
  }
  const D d;
  const DBits bits;
  const std::byte* const signs = in + sizeof(float);
  const auto magnitude = hn::Set(bits, scale);
  const auto sign_bit = hn::Set(bits, ~Fp32::kMagnitude);
  // Bit k of a word becomes the sign of lane k.
  const auto shift = hn::Sub(hn::Set(bits, 31u), hn::Iota(bits, 0));
  for (size_t word = 0; word < kOneBitBlockElems / kWordElems; ++word) {
    const uint32_t word_bits = LoadBits<Fp32>(signs, word);
    for (size_t j = 0; j < kWordElems; j += hn::Lanes(d)) {
      const auto sign = hn::And(hn::Shl(hn::Set(bits, word_bits >> j), shift), sign_bit);
      hn::StoreU(hn::BitCast(d, hn::Xor(magnitude, sign)), d, out + word * kWordElems + j);
    }
  }
}

#endif  // THALWEG_VECTORS

constexpr size_t kBlockBytes = sizeof(float) + kOneBitBlockElems / 8;

template <bool kFeedback>
uint64_t EncodeAll(const float* values, float* residual, size_t elems, std::byte* out) {
  uint64_t nonfinite = 0;
  for (size_t done = 0; done < elems; done += kOneBitBlockElems) {
    const size_t block = std::min<size_t>(elems - done, kOneBitBlockElems);
    float* const block_residual = kFeedback ? residual + done : nullptr;
#if THALWEG_VECTORS
    if (block == kOneBitBlockElems) {
      nonfinite += EncodeBlock<kFeedback>(values + done, block_residual, out);
      out += kBlockBytes;
      continue;
    }
#endif
    nonfinite += EncodeAnyBlock<kFeedback>(values + done, block_residual, block, out);
    out += kBlockBytes;
  }
  return nonfinite;
}

uint64_t EncodeOneBitForTarget(const float* values, float* residual, size_t elems, std::byte* out) {
  return residual == nullptr ? EncodeAll<false>(values, nullptr, elems, out)
                             : EncodeAll<true>(values, residual, elems, out);
}

void DecodeOneBitForTarget(const std::byte* in, size_t elems, float* out) {
#if THALWEG_VECTORS
  for (; elems >= kOneBitBlockElems; elems -= kOneBitBlockElems) {
    DecodeBlock(in, out);
    in += kBlockBytes;
    out += kOneBitBlockElems;
  }
#endif
  while (elems > 0) {
    const size_t block = std::min<size_t>(elems, kOneBitBlockElems);
    DecodeAnyBlock(in, block, out);
    in += kBlockBytes;
    out += block;
    elems -= block;
  }
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

uint64_t EncodeOneBit(const float* values, float* residual, size_t elems, std::byte* out) {
  return HWY_DYNAMIC_DISPATCH(EncodeOneBitForTarget)(values, residual, elems, out);
}

void DecodeOneBit(const std::byte* in, size_t elems, float* out) {
  HWY_DYNAMIC_DISPATCH(DecodeOneBitForTarget)(in, elems, out);
}

}  // namespace thalweg
#endif  // HWY_ONCE
