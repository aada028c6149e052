#include <cassert>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "hwy/base.h"
#include "hwy/cache_control.h"
#include "kernels/cast/cast.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cast/cast_cpu.cc"
#include "hwy/foreach_target.h"  // compiles the rest of this file once per target
#include "hwy/highway.h"
#include "kernels/cast/element.h"
#include "kernels/cast/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace thalweg {
namespace HWY_NAMESPACE {

template <class From, class To>
void CastAll(const std::byte* in, std::byte* out, size_t elems) {
  size_t i = 0;
#if THALWEG_VECTORS
  const hn::ScalableTag<float> d;
  for (const size_t lanes = hn::Lanes(d); elems - i >= lanes; i += lanes) {
    const auto values = LoadVector(From{}, d, in + i * sizeof(typename From::Bits));
    StoreVector(To{}, d, values, out + i * sizeof(typename To::Bits));
  }
#endif
  for (; i < elems; ++i) {
    StoreBits<To>(To::Narrow(From::Widen(LoadBits<From>(in, i))), out, i);
  }
}

// Copies; the two must not overlap. It is not memcpy: for 4 KiB to 1 MiB memcpy uses string
// instructions, which on recent processors are an order of magnitude slower at some pairs of
// addresses, and received pieces lie at any address. Long copies are for another process, or for
// later: their destination is not fetched into this core's cache before it is written.
void CopyForTarget(const std::byte* in, std::byte* out, size_t bytes) {
  size_t i = 0;
#if THALWEG_VECTORS
  constexpr size_t kLong = 4096;
  if (bytes >= kLong) {
    const hn::ScalableTag<uint8_t> d;
    const size_t step = hn::Lanes(d);
    const auto* const from = reinterpret_cast<const uint8_t*>(in);
    auto* const to = reinterpret_cast<uint8_t*>(out);
    i = hwy::RoundUpTo(reinterpret_cast<uintptr_t>(to), step) - reinterpret_cast<uintptr_t>(to);
    std::memcpy(to, from, i);
    for (; bytes - i >= 4 * step; i += 4 * step) {
      const auto bytes0 = hn::LoadU(d, from + i);
      const auto bytes1 = hn::LoadU(d, from + i + step);
      const auto bytes2 = hn::LoadU(d, from + i + 2 * step);
      const auto bytes3 = hn::LoadU(d, from + i + 3 * step);
      hn::Stream(bytes0, d, to + i);
      hn::Stream(bytes1, d, to + i + step);
      hn::Stream(bytes2, d, to + i + 2 * step);
      hn::Stream(bytes3, d, to + i + 3 * step);
    }
    hwy::FlushStream();  // before anybody is told that the bytes are there
  }
#endif
  std::memcpy(out + i, in + i, bytes - i);
}

void CastForTarget(DType from, const std::byte* in, DType to, std::byte* out, size_t elems) {
  if (from == DType::kFloat32 && to == DType::kFloat16) return CastAll<Fp32, Fp16>(in, out, elems);
  if (from == DType::kFloat16 && to == DType::kFloat32) return CastAll<Fp16, Fp32>(in, out, elems);
  if (from == DType::kFloat32 && to == DType::kBFloat16) {
    return CastAll<Fp32, BFloat16>(in, out, elems);
  }
  assert(from == DType::kBFloat16 && to == DType::kFloat32);
  CastAll<BFloat16, Fp32>(in, out, elems);
}

// In fp32 only infinities and NaN have this exponent.
[[maybe_unused]] constexpr int32_t kNonfinite = 0x7f800000;  // unused on targets without vectors

template <class From>
bool WidenScaledAll(const std::byte* in, float factor, std::byte* out, size_t elems) {
  bool is_finite = true;
  size_t i = 0;
#if THALWEG_VECTORS
  const hn::ScalableTag<float> d;
  const hn::RebindToSigned<decltype(d)> bits;
  const auto factors = hn::Set(d, factor);
  const auto nonfinite = hn::Set(bits, kNonfinite);
  auto largest = hn::Zero(bits);
  for (const size_t lanes = hn::Lanes(d); elems - i >= lanes; i += lanes) {
    const auto values = LoadVector(From{}, d, in + i * sizeof(typename From::Bits));
    largest = hn::Max(largest, hn::And(hn::BitCast(bits, values), nonfinite));
    StoreVector(Fp32{}, d, hn::Mul(values, factors), out + i * sizeof(float));
  }
  is_finite = hn::AllTrue(bits, hn::Lt(largest, nonfinite));
#endif
  for (; i < elems; ++i) {
    const float value = From::Widen(LoadBits<From>(in, i));
    is_finite = is_finite && std::isfinite(value);
    StoreBits<Fp32>(Fp32::Narrow(value * factor), out, i);
  }
  return is_finite;
}

bool WidenScaledForTarget(DType from, const std::byte* in, float factor, std::byte* out,
                          size_t elems) {
  if (from == DType::kFloat16) return WidenScaledAll<Fp16>(in, factor, out, elems);
  assert(from == DType::kBFloat16);
  return WidenScaledAll<BFloat16>(in, factor, out, elems);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace thalweg
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace thalweg {

HWY_EXPORT(CopyForTarget);
HWY_EXPORT(CastForTarget);
HWY_EXPORT(WidenScaledForTarget);

namespace {

bool Overlap(const void* a, const void* b, size_t bytes) {
  const auto at = reinterpret_cast<uintptr_t>(a);
  const auto bt = reinterpret_cast<uintptr_t>(b);
  return at < bt + bytes && bt < at + bytes;
}

void Copy(const void* in, void* out, size_t bytes) {
  if (Overlap(in, out, bytes)) {
    std::memmove(out, in, bytes);
    return;
  }
  HWY_DYNAMIC_DISPATCH(CopyForTarget)
  (static_cast<const std::byte*>(in), static_cast<std::byte*>(out), bytes);
}

}  // namespace

void Cast(DType from, const void* in, DType to, void* out, size_t elems) {
  if (elems == 0) return;  // the pointers may be null then
  if (from == to) return Copy(in, out, elems * SizeOf(from));
  HWY_DYNAMIC_DISPATCH(CastForTarget)
  (from, static_cast<const std::byte*>(in), to, static_cast<std::byte*>(out), elems);
}

bool WidenScaled(DType from, const void* in, float factor, void* out, size_t elems) {
  return HWY_DYNAMIC_DISPATCH(WidenScaledForTarget)(from, static_cast<const std::byte*>(in), factor,
                                                    static_cast<std::byte*>(out), elems);
}

}  // namespace thalweg
#endif  // HWY_ONCE
