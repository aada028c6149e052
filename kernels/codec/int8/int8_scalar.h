// This header has the arithmetic of the wire format int8, one element at a time: docs/codecs.md
// defines it.
#pragma once

#include <cfloat>
#include <cstdint>

#include "core/base/lossy_formats.h"
#include "kernels/cast/element.h"
#include "kernels/launch/host_device.h"

namespace thalweg {

inline constexpr uint64_t kInt8BlockElems = FindLossy(WireFormat::kInt8)->block_elems;

inline constexpr int kInt8LargestCode = 125;
inline constexpr int8_t kInt8InfinityCode = 126;
inline constexpr int8_t kInt8NanCode = -128;

// Adding this to a number below 2^22 rounds it to a whole one, ties to even, and leaves that one in
// the lower bits of the sum.
inline constexpr float kInt8Rounder = 0x1.8p23f;

// An Int8Scale is the value of one code step, and its inverse. Below the normal range both are 0:
// the inverse of such a scale could be infinite.
struct Int8Scale {
  float value = 0;
  float inverse = 0;
};

// Returns the scale for a block whose finite elements have magnitudes of at most these bits.
THALWEG_HD inline Int8Scale Int8ScaleOf(uint32_t largest_magnitude) {
  const float value = BitCast<float>(largest_magnitude) / kInt8LargestCode;
  if (value < FLT_MIN) return {};
  return {value, 1.0f / value};
}

// Returns the code of x. Where x is finite, sets `*residual`, unless that is null, to what is lost.
THALWEG_HD inline int8_t EncodeInt8Element(float x, const Int8Scale& scale, float* residual) {
  const uint32_t bits = BitCast<uint32_t>(x);
  if (!IsFinite<Fp32>(bits)) {
    if ((bits & Fp32::kMagnitude) > Fp32::kInfinity) return kInt8NanCode;
    return x > 0 ? kInt8InfinityCode : static_cast<int8_t>(-kInt8InfinityCode);
  }
  const float rounded = Fma(x, scale.inverse, kInt8Rounder) - kInt8Rounder;
  if (residual != nullptr) *residual = x - rounded * scale.value;
  return static_cast<int8_t>(rounded);
}

THALWEG_HD inline float DecodeInt8Element(int8_t code, float scale) {
  const bool infinite = code == kInt8InfinityCode || code == -kInt8InfinityCode;
  const bool number = code >= -kInt8LargestCode && code <= kInt8LargestCode;
  if (!IsFinite<Fp32>(BitCast<uint32_t>(scale)) || !(number || infinite)) {
    return Fp32::Widen(Fp32::kNan);
  }
  if (infinite)
    return Fp32::Widen(code > 0 ? Fp32::kInfinity : ~Fp32::kMagnitude | Fp32::kInfinity);
  return static_cast<float>(code) * scale;
}

}  // namespace thalweg
