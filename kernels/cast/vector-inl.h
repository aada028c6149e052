// This header converts vectors of elements to vectors of their accumulators, for the Highway target
// that is being compiled. Sources that compile themselves once per target include it, hence the
// guard that toggles.
//
// THALWEG_VECTORS is 1 on targets with a fused multiply-add and fp16 conversion of their own. On
// all others kernels use the scalar functions: slower, with equal bits.
#if defined(THALWEG_KERNELS_CAST_VECTOR_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef THALWEG_KERNELS_CAST_VECTOR_INL_H_
#undef THALWEG_KERNELS_CAST_VECTOR_INL_H_
#else
#define THALWEG_KERNELS_CAST_VECTOR_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"
#include "kernels/cast/element.h"

#undef THALWEG_VECTORS
#if HWY_NATIVE_FMA && (HWY_ARCH_X86 || HWY_ARCH_ARM_A64)
#define THALWEG_VECTORS 1
#else
#define THALWEG_VECTORS 0
#endif

HWY_BEFORE_NAMESPACE();
namespace thalweg {
namespace HWY_NAMESPACE {
#if THALWEG_VECTORS

namespace hn = hwy::HWY_NAMESPACE;

// Memory is read and written as vectors of bytes, which may lie at any address.

template <class D>
HWY_INLINE hn::Vec<D> LoadBytes(D d, const std::byte* from) {
  const hn::Repartition<uint8_t, D> bytes;
  return hn::BitCast(d, hn::LoadU(bytes, reinterpret_cast<const uint8_t*>(from)));
}

template <class D>
HWY_INLINE void StoreBytes(D d, hn::Vec<D> vector, std::byte* to) {
  const hn::Repartition<uint8_t, D> bytes;
  hn::StoreU(hn::BitCast(bytes, vector), bytes, reinterpret_cast<uint8_t*>(to));
}

template <class D>
HWY_INLINE hn::Vec<D> LoadVector(Fp32, D d, const std::byte* from) {
  return LoadBytes(d, from);
}

template <class D>
HWY_INLINE hn::Vec<D> LoadVector(Fp64, D d, const std::byte* from) {
  return LoadBytes(d, from);
}

template <class D>
HWY_INLINE hn::Vec<D> LoadVector(Fp16, D d, const std::byte* from) {
  const hn::Rebind<hwy::float16_t, D> d16;
  return hn::PromoteTo(d, LoadBytes(d16, from));
}

template <class D>
HWY_INLINE hn::Vec<D> LoadVector(BFloat16, D d, const std::byte* from) {
  const hn::Rebind<uint16_t, D> d16;
  const hn::RebindToUnsigned<D> d32;
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(d32, LoadBytes(d16, from))));
}

template <class D>
HWY_INLINE void StoreVector(Fp32, D d, hn::Vec<D> values, std::byte* to) {
  StoreBytes(d, values, to);
}

template <class D>
HWY_INLINE void StoreVector(Fp64, D d, hn::Vec<D> values, std::byte* to) {
  StoreBytes(d, values, to);
}

template <class D>
HWY_INLINE void StoreVector(Fp16, D, hn::Vec<D> values, std::byte* to) {
  const hn::Rebind<hwy::float16_t, D> d16;
  StoreBytes(d16, hn::DemoteTo(d16, values), to);
}

// Converts as BFloat16FromFp32 does: Highway's own conversion truncates.
template <class D>
HWY_INLINE void StoreVector(BFloat16, D d, hn::Vec<D> values, std::byte* to) {
  const hn::RebindToUnsigned<D> d32;
  const hn::RebindToSigned<D> signed32;
  const hn::Rebind<uint16_t, D> d16;
  const auto bits = hn::BitCast(d32, values);
  const auto upper = hn::ShiftRight<16>(bits);
  const auto odd = hn::And(upper, hn::Set(d32, 1u));
  const auto rounded = hn::ShiftRight<16>(hn::Add(hn::Add(bits, hn::Set(d32, 0x7fffu)), odd));
  const auto quieted = hn::Or(upper, hn::Set(d32, 0x0040u));
  const auto narrow = hn::IfThenElse(hn::RebindMask(d32, hn::IsNaN(values)), quieted, rounded);
  StoreBytes(d16, hn::DemoteTo(d16, hn::BitCast(signed32, narrow)), to);
}

#endif  // THALWEG_VECTORS
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace thalweg
HWY_AFTER_NAMESPACE();

#endif  // THALWEG_KERNELS_CAST_VECTOR_INL_H_
