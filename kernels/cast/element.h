// This header defines the element types as C++ types, so that a kernel is written once for all of
// them.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "kernels/cast/scalar.h"
#include "kernels/launch/host_device.h"

namespace thalweg {

template <class To, class From>
THALWEG_HD inline To BitCast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// Each type has: Bits, its bit pattern; Accumulator, the type it is computed in; Widen and Narrow
// between the two; WidenNumber and NarrowNumber, which may make any NaN of a NaN and are one
// instruction of a GPU; kMagnitude, all bits but the sign; kInfinity; kNan, the one NaN that sums
// give; and kOverflow, the smallest magnitude of an Accumulator that Narrow makes infinite.

struct Fp32 {
  using Bits = uint32_t;
  using Accumulator = float;
  static constexpr Bits kMagnitude = 0x7fffffffu;
  static constexpr Bits kInfinity = 0x7f800000u;
  static constexpr Bits kNan = 0x7fc00000u;
  static constexpr float kOverflow = std::numeric_limits<float>::infinity();
  THALWEG_HD static float Widen(Bits bits) { return BitCast<float>(bits); }
  THALWEG_HD static Bits Narrow(float value) { return BitCast<Bits>(value); }
  THALWEG_HD static float WidenNumber(Bits bits) { return Widen(bits); }
  THALWEG_HD static Bits NarrowNumber(float value) { return Narrow(value); }
};

struct Fp16 {
  using Bits = uint16_t;
  using Accumulator = float;
  static constexpr Bits kMagnitude = 0x7fffu;
  static constexpr Bits kInfinity = 0x7c00u;
  static constexpr Bits kNan = 0x7e00u;
  static constexpr float kOverflow = 65520.0f;
  THALWEG_HD static float Widen(Bits bits) {
#if defined(__CUDA_ARCH__)
    const float nan = BitCast<float>(Fp32NanFromFp16(bits));
    return (bits & kMagnitude) > kInfinity ? nan : WidenNumber(bits);
#else
    return BitCast<float>(Fp32FromFp16(bits));
#endif
  }
  THALWEG_HD static Bits Narrow(float value) {
#if defined(__CUDA_ARCH__)
    const Bits nan = Fp16NanFromFp32(BitCast<uint32_t>(value));
    return value != value ? nan : NarrowNumber(value);
#else
    return Fp16FromFp32(BitCast<uint32_t>(value));
#endif
  }
  THALWEG_HD static float WidenNumber(Bits bits) {
#if defined(__CUDA_ARCH__)
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
#else
    return Widen(bits);
#endif
  }
  THALWEG_HD static Bits NarrowNumber(float value) {
#if defined(__CUDA_ARCH__)
    Bits bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
#else
    return Narrow(value);
#endif
  }
};

struct BFloat16 {
  using Bits = uint16_t;
  using Accumulator = float;
  static constexpr Bits kMagnitude = 0x7fffu;
  static constexpr Bits kInfinity = 0x7f80u;
  static constexpr Bits kNan = 0x7fc0u;
  static constexpr float kOverflow = 0x1.ffp127f;
  THALWEG_HD static float Widen(Bits bits) { return BitCast<float>(Fp32FromBFloat16(bits)); }
  THALWEG_HD static Bits Narrow(float value) { return BFloat16FromFp32(BitCast<uint32_t>(value)); }
  THALWEG_HD static float WidenNumber(Bits bits) { return Widen(bits); }
  THALWEG_HD static Bits NarrowNumber(float value) {
#if defined(__CUDA_ARCH__)
    Bits bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
#else
    return Narrow(value);
#endif
  }
};

struct Fp64 {
  using Bits = uint64_t;
  using Accumulator = double;
  static constexpr Bits kMagnitude = 0x7fffffffffffffffu;
  static constexpr Bits kInfinity = 0x7ff0000000000000u;
  static constexpr Bits kNan = 0x7ff8000000000000u;
  static constexpr double kOverflow = std::numeric_limits<double>::infinity();
  THALWEG_HD static double Widen(Bits bits) { return BitCast<double>(bits); }
  THALWEG_HD static Bits Narrow(double value) { return BitCast<Bits>(value); }
  THALWEG_HD static double WidenNumber(Bits bits) { return Widen(bits); }
  THALWEG_HD static Bits NarrowNumber(double value) { return Narrow(value); }
};

// Returns whether the bits of an element represent a finite number.
template <class Element>
THALWEG_HD constexpr bool IsFinite(typename Element::Bits bits) {
  return (bits & Element::kMagnitude) < Element::kInfinity;
}

// Returns a·b + c, rounded once.
THALWEG_HD inline float Fma(float a, float b, float c) { return std::fma(a, b, c); }
THALWEG_HD inline double Fma(double a, double b, double c) { return std::fma(a, b, c); }

// Returns element `index` of an array at any address.
template <class Element>
THALWEG_HD inline typename Element::Bits LoadBits(const void* array, size_t index) {
  typename Element::Bits bits;
  std::memcpy(&bits, static_cast<const std::byte*>(array) + index * sizeof(bits), sizeof(bits));
  return bits;
}

template <class Element>
THALWEG_HD inline void StoreBits(typename Element::Bits bits, void* array, size_t index) {
  std::memcpy(static_cast<std::byte*>(array) + index * sizeof(bits), &bits, sizeof(bits));
}

}  // namespace thalweg
