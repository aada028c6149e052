// These functions convert between fp32 and the 16-bit types, one value at a time, on bit patterns
// and in integer arithmetic only: every compiler, processor and rounding mode gives the same bits,
// CUDA devices too. Every vector version is compared with them.
//
// Narrowing rounds to nearest, ties to even; subnormals are kept; what exceeds the range becomes
// infinite. NaN stays NaN with its sign and the upper bits of its payload, quieted. Widening is
// exact; a signalling fp16 NaN is quieted, as processors do, while bf16, being half an fp32, keeps
// every bit.
#pragma once

#include <cstdint>

#include "kernels/launch/host_device.h"

namespace thalweg {

// Requires a NaN.
THALWEG_HD constexpr uint16_t Fp16NanFromFp32(uint32_t bits) {
  return static_cast<uint16_t>(((bits >> 16) & 0x8000u) | 0x7e00u | ((bits >> 13) & 0x03ffu));
}

THALWEG_HD constexpr uint16_t Fp16FromFp32(uint32_t bits) {
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return Fp16NanFromFp32(bits);
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65520 and more
  if (magnitude >= 0x38800000u) {                                              // 2^-14 and more
    const uint32_t rebiased = magnitude - (112u << 23);
    // A carry out of the fraction correctly increments the exponent.
    return static_cast<uint16_t>(sign | ((rebiased + 0x0fffu + ((rebiased >> 13) & 1u)) >> 13));
  }
  // The result is subnormal or zero: a whole number of units of 2^-24. Below half a unit it is
  // zero.
  const uint32_t shift = 126u - (magnitude >> 23);
  if (shift > 24u) return static_cast<uint16_t>(sign);
  const uint32_t significand = (magnitude & 0x007fffffu) | 0x00800000u;
  const uint32_t units = significand >> shift;
  const uint32_t rest = significand & ((1u << shift) - 1u);
  const uint32_t half = 1u << (shift - 1u);
  const uint32_t up = (rest > half || (rest == half && (units & 1u) != 0u)) ? 1u : 0u;
  return static_cast<uint16_t>(sign | (units + up));
}

// Requires a NaN.
THALWEG_HD constexpr uint32_t Fp32NanFromFp16(uint16_t half) {
  return (static_cast<uint32_t>(half & 0x8000u) << 16) | 0x7fc00000u |
         (static_cast<uint32_t>(half & 0x03ffu) << 13);
}

THALWEG_HD constexpr uint32_t Fp32FromFp16(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  uint32_t exponent = (half >> 10) & 0x1fu;
  uint32_t fraction = half & 0x03ffu;
  if (exponent == 0x1fu) return fraction != 0u ? Fp32NanFromFp16(half) : sign | 0x7f800000u;
  if (exponent == 0u) {
    if (fraction == 0u) return sign;
    for (exponent = 1u; (fraction & 0x0400u) == 0u; fraction <<= 1) --exponent;
    fraction &= 0x03ffu;
  }
  // The exponent of a subnormal has wrapped below zero here; adding the bias makes it positive
  // again.
  return sign | ((exponent + 112u) << 23) | (fraction << 13);
}

THALWEG_HD constexpr uint16_t BFloat16FromFp32(uint32_t bits) {
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x0040u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

THALWEG_HD constexpr uint32_t Fp32FromBFloat16(uint16_t bfloat) {
  return static_cast<uint32_t>(bfloat) << 16;
}

}  // namespace thalweg
