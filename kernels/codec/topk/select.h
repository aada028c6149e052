// Which elements of a chunk topk sends. Same choice on every processor.
#pragma once

#include <cstdint>
#include <vector>

namespace thalweg {

// A residual, and the index of the element that it belongs to.
struct IndexedResidual {
  uint32_t index = 0;
  float residual = 0;
};

// Sets residual = x = values + residual. Returns what the residual was wherever x is not finite, by
// rising index. The two must not overlap. Thread-safe.
std::vector<IndexedResidual> AddResidual(const float* values, float* residual, uint64_t elems);

// The indices, rising, of the `count` ≥ 1 elements of largest magnitude; of equal magnitudes the
// lower index goes first. Fewer when fewer are not zero; more when more than `count` are not
// finite, which are all chosen. Takes a time linear in `elems`, most of it for one pass over x.
// Requires elems ≤ kMaxLossyElems. Thread-safe.
std::vector<uint32_t> SelectLargest(const float* x, uint64_t elems, uint64_t count);

}  // namespace thalweg
