// This header defines how onebit rotates whole blocks: some signs are flipped, then a Hadamard
// transform spreads the energy of a few elements over all of them. Signs with a common magnitude
// describe poorly a block with few large elements, as gradients have; of a rotated block, whose
// elements are nearly normally distributed, they keep 2/π of the energy, whatever the block was
// before.
//
// Both steps are their own inverse except for a factor, so decoding runs them in reverse order.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "core/base/lossy_formats.h"
#include "kernels/codec/splitmix.h"

namespace thalweg {

inline constexpr uint64_t kOneBitBlockElems = FindLossy(WireFormat::kOneBit)->block_elems;

using RotationFlips = std::array<uint32_t, kOneBitBlockElems>;

// Returns the sign bit where an element is flipped, else 0: bit i % 64 of the number i / 64 that
// splitmix64 gives with seed 0.
constexpr RotationFlips MakeRotationFlips() {
  RotationFlips flips{};
  uint64_t state = 0;
  for (size_t i = 0; i < flips.size(); i += 64) {
    state += kSplitMixStep;
    const uint64_t bits = SplitMix(state);
    for (size_t bit = 0; bit < 64; ++bit) {
      flips[i + bit] = static_cast<uint32_t>(bits >> bit & 1u) << 31;
    }
  }
  return flips;
}

inline constexpr RotationFlips kRotationFlips = MakeRotationFlips();

// Elements are multiplied by this before the transform, so that neither a sum of 1024 nor the sum
// of the results' magnitudes overflows.
inline constexpr float kRotationShrink = 0x1p-16f;

// The scale is the sum of the transformed magnitudes times this factor: 2^16 undoes
// kRotationShrink, 1/32 makes the transform a rotation, 1/1024 gives the mean, and 1/32 is for the
// decoder's transform.
inline constexpr float kRotationScale = 0x1p-4f;

}  // namespace thalweg
