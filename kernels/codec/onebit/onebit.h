// This header implements the wire format onebit: blocks of 1024 elements, rotated (rotation.h),
// each a float32 scale, which is the mean magnitude, and the sign of each element. A chunk's last
// block is not rotated if it is shorter. docs/codecs.md describes the format byte by byte.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/codec/feedback.h"

namespace thalweg {

// Encodes x = values + the last residual (x = values without feedback) into
// MaxEncodedBytes(kOneBit, elems) bytes at `out`; the next residual is x − what the bytes decode
// to, or the largest float where that is infinite. A block with a non-finite element of x is sent
// as NaN, and its residual stays as it was. Returns how many elements of x are not finite. Blocks
// are encoded one by one, so chunks cut at their boundaries give the same bytes. Every processor
// gives the same bits. Residuals must not overlap `values`; `out` needs no alignment. Thread-safe.
uint64_t EncodeOneBit(const float* values, Feedback feedback, size_t elems, std::byte* out);

// Decodes any MaxEncodedBytes(kOneBit, elems) bytes: a block whose scale is not finite is all NaN,
// each the positive quiet one without payload. Thread-safe.
void DecodeOneBit(const std::byte* in, size_t elems, float* out);

}  // namespace thalweg
