// This header divides many numbers by the same one, with the bits of a division each.
#pragma once

#include <cstdint>

#include "kernels/cast/element.h"
#include "kernels/launch/host_device.h"

namespace thalweg {

// A GPU divides by some ten instructions and a branch. Where the inverse of the divisor is known,
// five do, if no step underflows or overflows (P. Markstein, Computation of elementary functions on
// the IBM RISC System/6000 processor, 1990): a quotient that is off by less than one unit of
// its last place becomes the rounded one by adding remainder times inverse.
struct Divisor {
  float value = 1;
  float inverse = 0;      // rounded; 0: it is not used
  bool is_exact = false;  // the divisor is a power of two: to multiply by the inverse is enough

  Divisor() = default;
  explicit Divisor(float divisor)
      : value(divisor),
        inverse(divisor >= 1 && divisor <= 0x1p24f ? 1 / divisor : 0),
        is_exact(inverse != 0 && (Fp32::Narrow(divisor) & 0x007fffffu) == 0) {}

  // Returns whether ByInverse() is right for x.
  THALWEG_HD bool Suits(float x) const {
    constexpr uint32_t kLeast = (127u - 100u) << 23;  // 2^-100: quotients and remainders are normal
    const uint32_t magnitude = Fp32::Narrow(x) & Fp32::kMagnitude;
    return inverse != 0 && (magnitude == 0 || (magnitude >= kLeast && magnitude < Fp32::kInfinity));
  }

  THALWEG_HD float ByInverse(float x) const {
    const float first = x * inverse;  // off by less than two units
    const float second = Fma(Fma(-first, value, x), inverse, first);
    const float quotient = Fma(Fma(-second, value, x), inverse, second);
    return x == 0 ? first : quotient;  // which has the sign of x
  }
};

template <int kCount>
THALWEG_HD inline void Divide(const Divisor& divisor, float (&values)[kCount]) {
  if (divisor.is_exact) {
    for (float& value : values) value *= divisor.inverse;
    return;
  }
  bool suits = true;
  for (const float value : values) suits &= divisor.Suits(value);
  if (suits) {
    for (float& value : values) value = divisor.ByInverse(value);
  } else {
    for (float& value : values) value = value / divisor.value;
  }
}

template <int kCount>
THALWEG_HD inline void Divide(const Divisor& divisor, double (&values)[kCount]) {
  for (double& value : values) value = value / divisor.value;
}

}  // namespace thalweg
