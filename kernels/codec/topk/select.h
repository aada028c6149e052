// This header selects the elements of a chunk that topk sends. Every processor makes the same
// choice.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/codec/feedback.h"

namespace thalweg {

// An IndexedResidual is a residual and the index of its element.
struct IndexedResidual {
  uint32_t index = 0;
  float residual = 0;
};

// Sets the next residual to x = values + the last one. Returns the last residuals wherever x is not
// finite, by rising index. They must not overlap `values`. Thread-safe.
std::vector<IndexedResidual> AddResidual(const float* values, Feedback feedback, uint64_t elems);

// Returns the rising indices of the `count` ≥ 1 elements of largest magnitude; of equal magnitudes
// the lower index goes first. Returns fewer when fewer are not zero, and more when more than
// `count` are not finite, which are all chosen. Takes time linear in `elems`, most of it for one
// pass over x. Requires elems ≤ kMaxLossyElems. Thread-safe.
std::vector<uint32_t> SelectLargest(const float* x, uint64_t elems, uint64_t count);

}  // namespace thalweg
