// This header has helpers for the tests of the lossy formats.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <random>
#include <vector>

#include "core/base/wire_format.h"
#include "kernels/cast/element.h"
#include "kernels/cast/test_util.h"
#include "kernels/codec/payload_test_util.h"

namespace thalweg {

using Floats = std::vector<float>;

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
inline constexpr auto kLossyFormats = [] {
  std::array<WireFormat, kLossyTraits.size()> formats{};
  for (size_t i = 0; i < formats.size(); ++i) formats[i] = kLossyTraits[i].format;
  return formats;
}();

// These sizes are around every block and tile of the formats.
inline constexpr size_t kLossySizes[] = {0,   1,   2,   7,    8,    9,    33,   255, 256,
                                         257, 511, 513, 1023, 1024, 1025, 1281, 5000};

inline Bytes BytesOf(std::initializer_list<int> values) {
  Bytes bytes;
  for (int value : values) bytes.push_back(static_cast<std::byte>(value));
  return bytes;
}

inline Floats RandomFloats(size_t elems, unsigned special_every, std::mt19937_64& random) {
  const Bytes bytes = RandomElements<Fp32>(elems, special_every, random);
  Floats floats(elems);
  if (elems > 0) std::memcpy(floats.data(), bytes.data(), bytes.size());
  return floats;
}

// Returns bit patterns, because NaN differs from itself and −0 does not differ from 0.
inline std::vector<uint32_t> BitsOf(const Floats& floats) {
  std::vector<uint32_t> bits;
  for (float value : floats) bits.push_back(BitCast<uint32_t>(value));
  return bits;
}

inline Floats Sum(const Floats& a, const Floats& b) {
  Floats sum(a.size());
  for (size_t i = 0; i < a.size(); ++i) sum[i] = a[i] + b[i];
  return sum;
}

// Returns the residual of x when it decodes to `decoded`, at most the largest float; for elements
// that are not sent as numbers it is the previous residual.
inline Floats ResidualOf(const Floats& x, const Floats& decoded, const Floats& before) {
  Floats residual = before;
  for (size_t i = 0; i < x.size(); ++i) {
    constexpr float kLargest = std::numeric_limits<float>::max();
    if (std::isfinite(decoded[i])) residual[i] = std::clamp(x[i] - decoded[i], -kLargest, kLargest);
  }
  return residual;
}

inline uint64_t CountNonFinite(const Floats& x) {
  return static_cast<uint64_t>(
      std::count_if(x.begin(), x.end(), [](float value) { return !std::isfinite(value); }));
}

}  // namespace thalweg
