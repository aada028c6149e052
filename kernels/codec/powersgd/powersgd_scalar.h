// This header has the arithmetic of PowerSGD's passes on one element, for processors and GPUs;
// powersgd.h explains its purpose.
#pragma once

#include <cfloat>
#include <cstdint>

#include "kernels/cast/element.h"
#include "kernels/launch/host_device.h"

namespace thalweg {

// Pass 2 sums this many rows separately, as powersgd.h specifies.
inline constexpr uint32_t kSummedRows = 8;

// Returns what pass 1 stores over the error `e` of a gradient `g`; the two add up to `x`.
THALWEG_HD inline float StoredSum(float g, float e, float x) {
  if (!IsFinite<Fp32>(BitCast<uint32_t>(g))) return e;
  if (x > FLT_MAX) return FLT_MAX;
  return x < -FLT_MAX ? -FLT_MAX : x;
}

// Returns the error that StoredSum turned into `x`.
THALWEG_HD inline float RestoredError(float g, float x) {
  return IsFinite<Fp32>(BitCast<uint32_t>(g)) ? x - g : x;
}

// Returns the difference of `x` and `result`.
THALWEG_HD inline float ErrorAfter(float x, float result) {
  const float left = x - result;
  return IsFinite<Fp32>(BitCast<uint32_t>(left)) ? left : x;
}

}  // namespace thalweg
