// Several processes can make these gradients independently.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

namespace thalweg {

inline std::vector<float> MadeGradient(uint32_t rank, uint64_t round, size_t elems) {
  std::mt19937_64 random(rank * 1000 + round);
  std::normal_distribution<float> normal;
  std::vector<float> values(elems);
  for (float& v : values) v = normal(random);
  return values;
}

}  // namespace thalweg
