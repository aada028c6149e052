// This header implements the wire format int8: blocks of 256 elements, each a float32 scale and one
// byte for each element. docs/codecs.md describes it byte by byte.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/codec/feedback.h"

namespace thalweg {

// Encodes x = values + the last residual (x = values without feedback) into MaxEncodedBytes(kInt8,
// elems) bytes at `out`; the next residual is x − what the bytes decode to. A non-finite element of
// x is sent as such, and its residual stays as it was. Returns how many there are. Blocks are
// encoded one by one, so chunks cut at their boundaries give the same bytes. Every processor gives
// the same bits. Residuals must not overlap `values`; `out` needs no alignment. Thread-safe.
uint64_t EncodeInt8(const float* values, Feedback feedback, size_t elems, std::byte* out);

// Decodes any MaxEncodedBytes(kInt8, elems) bytes: a block whose scale is not finite is all NaN,
// and so is a code that EncodeInt8 never writes. Every NaN is the positive quiet one without
// payload. Thread-safe.
void DecodeInt8(const std::byte* in, size_t elems, float* out);

}  // namespace thalweg
