// This header has the folds that weigh nothing: sum, minimum, maximum, product and bitwise folds of
// arrays. The mean is in reduce.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/base/dtype.h"
#include "core/base/fold.h"

namespace thalweg {

constexpr bool IsUnweighted(Fold fold) { return fold >= Fold::kSum && fold <= Fold::kBitXor; }

// Folds `inputs.size()` ≥ 1 arrays of `elems` elements into `out`, in input order: integers in
// their own type, where sums and products wrap around; floats in float32 (float64 when the inputs
// are fp64), rounded once to the type. An element that is NaN in any input is NaN in the result;
// the minimum and the maximum of zeros of both signs is the first of them. The result depends on
// nothing else, as with FoldMean.
//
// Requires IsUnweighted(fold), and integers for a bitwise fold; pointers need no alignment; `out`
// must not overlap an input unless it is exactly inputs[k]. Thread-safe. Returns how many of the
// results are NaN or infinite; every NaN is stored as FoldMean stores it.
uint64_t FoldElements(Fold fold, std::span<const void* const> inputs, DType type, void* out,
                      size_t elems);

}  // namespace thalweg
