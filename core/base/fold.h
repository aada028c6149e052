// Fold numbers the ways in which the contributions of several nodes become one result. The numeric
// values are part of the wire format: never renumber.
#pragma once

#include <cstdint>

namespace thalweg {

// kMean is the mean over all workers, of contributions that are means over their node's workers.
// The bitwise ones are for integers. kNone is no fold: the bytes of one node pass unchanged.
enum class Fold : uint8_t {
  kMean = 0,
  kSum = 1,
  kMin = 2,
  kMax = 3,
  kProduct = 4,
  kBitAnd = 5,
  kBitOr = 6,
  kBitXor = 7,
  kNone = 8,
};

// Returns true for the values above; any other value came from outside and must be refused.
constexpr bool IsValid(Fold fold) { return fold <= Fold::kNone; }
constexpr bool IsBitwise(Fold fold) { return fold >= Fold::kBitAnd && fold <= Fold::kBitXor; }

// Returns "mean", "sum", "min", "max", "product", "bitwise and", "bitwise or", "bitwise xor" or
// "bytes".
const char* Name(Fold fold);

}  // namespace thalweg
