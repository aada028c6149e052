// The arithmetic of PowerSGD's passes on one element, for processors and GPUs: powersgd.h says what
// it is good for.
#pragma once

#include <cfloat>
#include <cstdint>

#include "kernels/cast/element.h"
#include "kernels/host_device.h"

namespace thalweg {

// How many rows of pass 2 are summed on their own: what powersgd.h promises.
inline constexpr uint32_t kSummedRows = 8;

// What pass 1 stores over the error `e` of a gradient `g`, which add up to `x`.
THALWEG_HD inline float StoredSum(float g, float e, float x) {
  if (!IsFinite<Fp32>(BitCast<uint32_t>(g))) return e;
  if (x > FLT_MAX) return FLT_MAX;
  return x < -FLT_MAX ? -FLT_MAX : x;
}

// The error that StoredSum turned into `x`.
THALWEG_HD inline float RestoredError(float g, float x) {
  return IsFinite<Fp32>(BitCast<uint32_t>(g)) ? x - g : x;
}

// What `result` leaves of `x`.
THALWEG_HD inline float ErrorAfter(float x, float result) {
  const float left = x - result;
  return IsFinite<Fp32>(BitCast<uint32_t>(left)) ? left : x;
}

}  // namespace thalweg
