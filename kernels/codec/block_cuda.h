// This header implements the formats whose payloads are blocks on a GPU, with the bits of
// EncodeLossy and DecodeLossy.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "core/base/wire_format.h"
#include "kernels/launch/stream.h"

namespace thalweg {

// Both queue on `stream` what EncodeLossy() and DecodeLossy() do, for arrays in device memory, in
// one launch that reads every input once and writes every output once. `values`, `residual` and
// `decoded` must be aligned to their elements; accesses are wide where they are multiples of 16
// bytes and payloads multiples of 4. Payloads may lie at any address. Nothing waits.
//
// Encoding adds to `*nonfinite`, in device memory, the number of non-finite elements. Returns
// InvalidArgument when `format` has no blocks; Internal when CUDA cannot launch. Thread-safe.
absl::Status EncodeBlocksOnDevice(CudaStream stream, WireFormat format, const float* values,
                                  float* residual, uint64_t elems, std::byte* out,
                                  uint64_t* nonfinite);
absl::Status DecodeBlocksOnDevice(CudaStream stream, WireFormat format, const std::byte* in,
                                  uint64_t elems, float* decoded);

}  // namespace thalweg
