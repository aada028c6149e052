// The element types as C++ types, so that a kernel is written once for all of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "kernels/cast/scalar.h"

namespace thalweg {

template <class To, class From>
inline To BitCast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// Each has: Bits, its bit pattern; Accumulator, the type it is computed in; Widen and Narrow
// between the two; kMagnitude, all bits but the sign; kInfinity; kNan, the one NaN that sums give;
// and kOverflow, the smallest magnitude of an Accumulator that Narrow makes infinite.

struct Fp32 {
  using Bits = uint32_t;
  using Accumulator = float;
  static constexpr Bits kMagnitude = 0x7fffffffu;
  static constexpr Bits kInfinity = 0x7f800000u;
  static constexpr Bits kNan = 0x7fc00000u;
  static constexpr float kOverflow = std::numeric_limits<float>::infinity();
  static float Widen(Bits bits) { return BitCast<float>(bits); }
  static Bits Narrow(float value) { return BitCast<Bits>(value); }
};

struct Fp16 {
  using Bits = uint16_t;
  using Accumulator = float;
  static constexpr Bits kMagnitude = 0x7fffu;
  static constexpr Bits kInfinity = 0x7c00u;
  static constexpr Bits kNan = 0x7e00u;
  static constexpr float kOverflow = 65520.0f;
  static float Widen(Bits bits) { return BitCast<float>(Fp32FromFp16(bits)); }
  static Bits Narrow(float value) { return Fp16FromFp32(BitCast<uint32_t>(value)); }
};

struct BFloat16 {
  using Bits = uint16_t;
  using Accumulator = float;
  static constexpr Bits kMagnitude = 0x7fffu;
  static constexpr Bits kInfinity = 0x7f80u;
  static constexpr Bits kNan = 0x7fc0u;
  static constexpr float kOverflow = 0x1.ffp127f;
  static float Widen(Bits bits) { return BitCast<float>(Fp32FromBFloat16(bits)); }
  static Bits Narrow(float value) { return BFloat16FromFp32(BitCast<uint32_t>(value)); }
};

struct Fp64 {
  using Bits = uint64_t;
  using Accumulator = double;
  static constexpr Bits kMagnitude = 0x7fffffffffffffffu;
  static constexpr Bits kInfinity = 0x7ff0000000000000u;
  static constexpr Bits kNan = 0x7ff8000000000000u;
  static constexpr double kOverflow = std::numeric_limits<double>::infinity();
  static double Widen(Bits bits) { return BitCast<double>(bits); }
  static Bits Narrow(double value) { return BitCast<Bits>(value); }
};

// Element `index` of an array at any address.
template <class Element>
inline typename Element::Bits LoadBits(const void* array, size_t index) {
  typename Element::Bits bits;
  std::memcpy(&bits, static_cast<const std::byte*>(array) + index * sizeof(bits), sizeof(bits));
  return bits;
}

template <class Element>
inline void StoreBits(typename Element::Bits bits, void* array, size_t index) {
  std::memcpy(static_cast<std::byte*>(array) + index * sizeof(bits), &bits, sizeof(bits));
}

}  // namespace thalweg
