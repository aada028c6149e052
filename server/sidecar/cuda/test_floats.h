// This header makes values of gradients for tests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <vector>

#include "core/base/dtype.h"
#include "kernels/cast/cast.h"

namespace thalweg {

using Floats = std::vector<float>;

inline Floats RandomFloats(uint64_t seed, uint64_t elems) {
  std::mt19937_64 rng(seed);
  std::normal_distribution<float> normal;
  Floats values(elems);
  for (float& v : values) v = normal(rng);
  return values;
}

inline bool SameBits(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Both convert between values and a bucket's type.
inline std::vector<std::byte> Narrowed(const Floats& values, DType dtype) {
  std::vector<std::byte> bytes(values.size() * SizeOf(dtype));
  Cast(DType::kFloat32, values.data(), dtype, bytes.data(), values.size());
  return bytes;
}
inline Floats Widened(const std::byte* bytes, DType dtype, uint64_t elems) {
  Floats values(elems);
  Cast(dtype, bytes, DType::kFloat32, values.data(), elems);
  return values;
}

}  // namespace thalweg
