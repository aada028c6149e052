// The wire format onebit on a GPU: the contract of kernels/codec/onebit/onebit.h, and its bits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "kernels/cuda/stream.h"

namespace thalweg {

// Queue on `stream` what EncodeOneBit() and DecodeOneBit() do, for arrays in device memory, in one
// launch that reads what is read once and writes what is written once. Arrays of floats must be
// aligned to their elements. Payloads may lie at any address; multiples of 4 are quicker. Nothing
// waits.
//
// Encoding adds to `*nonfinite`, in device memory, how many elements are not finite.
// Internal when CUDA cannot launch. Thread-safe.
absl::Status EncodeOneBitOnDevice(CudaStream stream, const float* values, float* residual,
                                  uint64_t elems, std::byte* out, uint64_t* nonfinite);
absl::Status DecodeOneBitOnDevice(CudaStream stream, const std::byte* in, uint64_t elems,
                                  float* decoded);

}  // namespace thalweg
