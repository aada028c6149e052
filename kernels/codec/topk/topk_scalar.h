// This header writes the bytes of the wire format topk, one entry at a time: docs/codecs.md defines
// them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cast/element.h"
#include "kernels/launch/host_device.h"

namespace thalweg {

// Returns the key that decides whether an element is sent. Keys of non-finite elements are larger
// than all others.
THALWEG_HD inline uint32_t MagnitudeBits(float x) {
  return BitCast<uint32_t>(x) & Fp32::kMagnitude;
}

// Returns how many bytes a gap takes.
THALWEG_HD inline uint32_t GapBytes(uint64_t gap) {
  uint32_t bytes = 1;
  for (; gap >= 0x80; gap >>= 7) ++bytes;
  return bytes;
}

// Writes an entry and returns where the next one begins. Every NaN becomes the same one, because
// processors differ in the NaN that an addition gives.
THALWEG_HD inline std::byte* PutEntry(uint64_t gap, float value, std::byte* to) {
  for (; gap >= 0x80; gap >>= 7) *to++ = static_cast<std::byte>(gap | 0x80);
  *to++ = static_cast<std::byte>(gap);
  const bool nan = MagnitudeBits(value) > Fp32::kInfinity;
  StoreBits<Fp32>(nan ? Fp32::kNan : BitCast<uint32_t>(value), to, 0);
  return to + sizeof(float);
}

}  // namespace thalweg
