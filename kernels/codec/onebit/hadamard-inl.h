// This header has the Hadamard transform of one block of onebit, for the Highway target that is
// being compiled. Sources that compile themselves once per target include it, hence the guard that
// toggles.
#if defined(THALWEG_KERNELS_CODEC_HADAMARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef THALWEG_KERNELS_CODEC_HADAMARD_INL_H_
#undef THALWEG_KERNELS_CODEC_HADAMARD_INL_H_
#else
#define THALWEG_KERNELS_CODEC_HADAMARD_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"
#include "kernels/codec/onebit/rotation.h"

HWY_BEFORE_NAMESPACE();
namespace thalweg {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

template <class V>
HWY_INLINE void Butterfly(V& a, V& b) {
  const V difference = hn::Sub(a, b);
  a = hn::Add(a, b);
  b = difference;
}

template <class D>
HWY_INLINE void OneStride(D d, float* block, size_t stride) {
  for (size_t base = 0; base < kOneBitBlockElems; base += 2 * stride) {
    for (size_t i = base; i < base + stride; i += hn::Lanes(d)) {
      auto a = hn::LoadU(d, block + i);
      auto b = hn::LoadU(d, block + i + stride);
      Butterfly(a, b);
      hn::StoreU(a, d, block + i);
      hn::StoreU(b, d, block + i + stride);
    }
  }
}

// Handles strides 4q, 2q and q in one pass over the block. Requires that q is at least a vector.
template <class D>
HWY_INLINE void ThreeStrides(D d, float* block, size_t q) {
  for (size_t base = 0; base < kOneBitBlockElems; base += 8 * q) {
    for (size_t i = base; i < base + q; i += hn::Lanes(d)) {
      auto v0 = hn::LoadU(d, block + i);
      auto v1 = hn::LoadU(d, block + i + q);
      auto v2 = hn::LoadU(d, block + i + 2 * q);
      auto v3 = hn::LoadU(d, block + i + 3 * q);
      auto v4 = hn::LoadU(d, block + i + 4 * q);
      auto v5 = hn::LoadU(d, block + i + 5 * q);
      auto v6 = hn::LoadU(d, block + i + 6 * q);
      auto v7 = hn::LoadU(d, block + i + 7 * q);
      Butterfly(v0, v4);
      Butterfly(v1, v5);
      Butterfly(v2, v6);
      Butterfly(v3, v7);
      Butterfly(v0, v2);
      Butterfly(v1, v3);
      Butterfly(v4, v6);
      Butterfly(v5, v7);
      Butterfly(v0, v1);
      Butterfly(v2, v3);
      Butterfly(v4, v5);
      Butterfly(v6, v7);
      hn::StoreU(v0, d, block + i);
      hn::StoreU(v1, d, block + i + q);
      hn::StoreU(v2, d, block + i + 2 * q);
      hn::StoreU(v3, d, block + i + 3 * q);
      hn::StoreU(v4, d, block + i + 4 * q);
      hn::StoreU(v5, d, block + i + 5 * q);
      hn::StoreU(v6, d, block + i + 6 * q);
      hn::StoreU(v7, d, block + i + 7 * q);
    }
  }
}

#if HWY_TARGET == HWY_SCALAR

template <class D>
HWY_INLINE hn::Vec<D> InnerStrides(D, hn::Vec<D> v) {
  return v;
}

#else

// Returns the sign bit in every lane that is the second of its pair.
template <class D>
HWY_INLINE hn::Vec<D> SecondOfPair(D d, uint32_t stride) {
  const hn::RebindToUnsigned<D> bits;
  const auto mask = hn::Set(bits, stride);
  const auto is_second = hn::Eq(hn::And(hn::Iota(bits, 0), mask), mask);
  return hn::BitCast(d, hn::IfThenElseZero(is_second, hn::Set(bits, 0x80000000u)));
}

// Handles the strides inside a vector: each lane gets the other of its pair, plus itself or, where
// it is the second, minus itself.
template <class D>
HWY_INLINE hn::Vec<D> InnerStrides(D d, hn::Vec<D> v) {
  if constexpr (hn::MaxLanes(d) >= 8) {
    v = hn::Add(hn::ConcatLowerUpper(d, v, v), hn::Xor(v, SecondOfPair(d, 4)));
  }
  v = hn::Add(hn::Shuffle1032(v), hn::Xor(v, SecondOfPair(d, 2)));
  return hn::Add(hn::Shuffle2301(v), hn::Xor(v, SecondOfPair(d, 1)));
}

#endif  // HWY_TARGET == HWY_SCALAR

// Transforms `block`, of kOneBitBlockElems elements. For strides of 512, 256 … 1: of every two
// elements a and b that lie a stride apart, a becomes a + b and b becomes a − b.
inline void Hadamard(float* block) {
  const hn::CappedTag<float, 8> d;
  static_assert(hn::MaxLanes(d) == 1 || hn::MaxLanes(d) == 4 || hn::MaxLanes(d) == 8);
  const size_t lanes = hn::Lanes(d);
  ThreeStrides(d, block, 128);
  ThreeStrides(d, block, 16);
  for (size_t stride = 8; stride > lanes; stride /= 2) OneStride(d, block, stride);
  for (size_t i = 0; i < kOneBitBlockElems; i += 2 * lanes) {
    auto a = hn::LoadU(d, block + i);
    auto b = hn::LoadU(d, block + i + lanes);
    Butterfly(a, b);
    hn::StoreU(InnerStrides(d, a), d, block + i);
    hn::StoreU(InnerStrides(d, b), d, block + i + lanes);
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace thalweg
HWY_AFTER_NAMESPACE();

#endif  // THALWEG_KERNELS_CODEC_HADAMARD_INL_H_
