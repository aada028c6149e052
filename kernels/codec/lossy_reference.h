// This reference implements the lossy formats as docs/codecs.md defines them, an element at a time,
// for comparison in tests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/codec/lossy_test_util.h"

namespace thalweg {

struct ReferenceChunk {
  Bytes bytes;
  Floats decoded;
};

float ReferenceDecodeInt8(int code, float scale);

ReferenceChunk ReferenceInt8(const Floats& x);

// Returns what a whole block with these signs decodes to, from the matrix: row i, column j is −1 to
// the number of ones that i and j have in common.
Floats ReferenceRotateBack(float scale, const std::vector<bool>& negative);

ReferenceChunk ReferenceOneBit(const Floats& x);

struct ReferenceEntry {
  uint64_t index;
  float value;
};

// Returns a topk payload of these entries, whose indices rise.
Bytes ReferenceTopK(const std::vector<ReferenceEntry>& entries);

// Returns Σ w·v in order with fused additions, divided: the definition in reduce.h.
Floats ReferenceMean(const std::vector<Floats>& values, const std::vector<uint32_t>& workers);

}  // namespace thalweg
