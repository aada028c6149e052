// Cast converts between fp32 and the 16-bit types.
#pragma once

#include <cstddef>

#include "core/base/dtype.h"

namespace thalweg {

// Converts `elems` elements. Supported: fp32 ↔ fp16, fp32 ↔ bf16, and equal types (a copy).
//
// Narrowing rounds to nearest, ties to even; what exceeds the range becomes infinite; subnormals
// are kept as they are (not flushed). NaN stays NaN with its sign and the upper bits of its
// payload, quieted; an infinity stays itself. Widening is exact. Pointers need no alignment; `in`
// and `out` must not overlap unless the types are equal. Thread-safe.
void Cast(DType from, const void* in, DType to, void* out, size_t elems);

// Converts `elems` elements of fp16 or bf16 to fp32 and multiplies them by `factor`. Returns
// whether all of `in` are finite. Pointers need no alignment and must not overlap. Thread-safe.
bool WidenScaled(DType from, const void* in, float factor, void* out, size_t elems);

}  // namespace thalweg
