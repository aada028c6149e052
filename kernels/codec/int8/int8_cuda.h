// The wire format int8 on a GPU: the contract of kernels/codec/int8/int8.h, and its bits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "kernels/cuda/stream.h"

namespace thalweg {

// Queue on `stream` what EncodeInt8() and DecodeInt8() do, for arrays in device memory, in one
// launch that reads what is read once and writes what is written once. `values`, `residual` and
// `decoded` must be aligned to their elements; where they are multiples of 16 bytes, and payloads
// multiples of 4, accesses are wide. Payloads may lie at any address. Nothing waits.
//
// Encoding adds to `*nonfinite`, in device memory, how many elements are not finite.
// Internal when CUDA cannot launch. Thread-safe.
absl::Status EncodeInt8OnDevice(CudaStream stream, const float* values, float* residual,
                                uint64_t elems, std::byte* out, uint64_t* nonfinite);
absl::Status DecodeInt8OnDevice(CudaStream stream, const std::byte* in, uint64_t elems,
                                float* decoded);

}  // namespace thalweg
