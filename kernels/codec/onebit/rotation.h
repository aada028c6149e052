// How onebit rotates whole blocks: some signs are flipped, then comes a Hadamard transform, which
// spreads what a few elements have over all of them. Signs with one magnitude for all say little
// about a block of which few elements are large, as in gradients; of a rotated block, whose
// elements are nearly normally distributed, they keep 2/π of the energy whatever it was before.
//
// Both steps are their own inverse but for a factor, so decoding does the same in turn.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "core/base/lossy_limits.h"
#include "kernels/codec/splitmix.h"

namespace thalweg {

using RotationFlips = std::array<uint32_t, kOneBitBlockElems>;

// The sign bit where an element is flipped, else 0: bit i % 64 of the number i / 64 that splitmix64
// gives with seed 0.
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

// Elements are shrunken by this before they are transformed, so that no sum of 1024 overflows, nor
// that of the results' magnitudes.
inline constexpr float kRotationShrink = 0x1p-16f;

// The scale is the sum of the shrunken results' magnitudes times this: 2^16 back, 1/32 to make the
// transform a rotation, 1/1024 for the mean, and 1/32 for the transform that decoding does.
inline constexpr float kRotationScale = 0x1p-4f;

}  // namespace thalweg
