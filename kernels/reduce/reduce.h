// The fold is the one operation that combines gradients, on nodes and on shards.
//
//   out[i] = round( (w[0]·in[0][i] + w[1]·in[1][i] + … ) / divisor )
//
// summed in input order in float32 (float64 when the inputs are fp64) with one fused multiply-add
// per input, divided, and rounded once to the output type, to nearest, ties to even. The result
// depends on nothing else: not on alignment, vector width or processor, so all replicas get the
// same bits. One pass: every input is read once, the output written once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/base/dtype.h"

namespace thalweg {

// Folds `inputs.size()` ≥ 1 arrays of `elems` elements of type `in` into `out` of type `out_type`.
//
// Requires: weights.size() == inputs.size(); divisor > 0; pointers need no alignment at all; `out`
// must not overlap an input unless it is exactly inputs[k] and the types are equal. The supported
// pairs of types are equal types, and fp32 → fp16 or bf16. Thread-safe. Returns how many of the
// results are NaN or infinite (after rounding to `out_type`). They are stored like all others, but
// every NaN as the positive quiet one without payload, because processors differ in which NaN an
// addition passes on.
uint64_t FoldMean(std::span<const void* const> inputs, std::span<const float> weights,
                  float divisor, DType in, DType out_type, void* out, size_t elems);

}  // namespace thalweg
