// This header has the arithmetic of the wire format onebit, one element at a time: docs/codecs.md
// defines it.
#pragma once

#include <cfloat>
#include <cstddef>
#include <cstdint>

#include "kernels/cast/element.h"
#include "kernels/codec/onebit/rotation.h"
#include "kernels/launch/host_device.h"

namespace thalweg {

// The sum of a block has this many partial sums, element i in number i mod 16, so that it is the
// same for vectors of any length.
inline constexpr size_t kOneBitPartials = 16;

// Magnitudes of a short block are multiplied by this while they are added, so that their sum does
// not overflow.
inline constexpr float kShortOneBitShrink = 0x1p-11f;

// Larger scales of whole blocks could decode to infinity.
inline constexpr float kLargestWholeOneBitScale = FLT_MAX / kOneBitBlockElems;

THALWEG_HD inline float AddToOneBitPartial(float magnitude, float partial) {
  return Fma(magnitude, kShortOneBitShrink, partial);
}

// Returns the scale of a short block of `elems` elements. Without the limit, rounding could take
// the mean of the very largest floats beyond them.
THALWEG_HD inline float ShortOneBitScale(float sum, size_t elems) {
  const float mean = sum / (static_cast<float>(elems) * kShortOneBitShrink);
  return mean < FLT_MAX ? mean : FLT_MAX;
}

THALWEG_HD inline float WholeOneBitScale(float sum) {
  const float scale = sum * kRotationScale;
  return scale < kLargestWholeOneBitScale ? scale : kLargestWholeOneBitScale;
}

// Returns the residual of x in a short block.
THALWEG_HD inline float ShortOneBitResidual(float x, float scale) {
  return x - (x < 0 ? -scale : scale);
}

// Returns the residual of x in a whole block in which it decodes to `decoded`. It stays finite
// where two of the largest floats are subtracted.
THALWEG_HD inline float WholeOneBitResidual(float x, float decoded) {
  const float left = x - decoded;
  if (left > FLT_MAX) return FLT_MAX;
  return left < -FLT_MAX ? -FLT_MAX : left;
}

// Returns what `sign`, 0 or 1, decodes to in a short block. Requires a finite scale.
THALWEG_HD inline float DecodeShortOneBit(uint32_t sign, uint32_t scale_bits) {
  return BitCast<float>(scale_bits ^ (sign << 31));
}

}  // namespace thalweg
