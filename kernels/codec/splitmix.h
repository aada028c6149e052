// splitmix64 gives pseudo-random numbers that are the same everywhere.
#pragma once

#include <cstdint>

namespace thalweg {

// Its state grows by this with each number.
inline constexpr uint64_t kSplitMixStep = 0x9e3779b97f4a7c15u;

// Is its output function: every bit of the result depends on every bit of `value`.
constexpr uint64_t SplitMix(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

}  // namespace thalweg
