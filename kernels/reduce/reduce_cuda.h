// FoldMeanOnDevice does the fold of kernels/reduce/reduce.h on a GPU: same contract, same bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "core/base/dtype.h"
#include "kernels/launch/stream.h"

namespace thalweg {

inline constexpr size_t kMaxDeviceFoldInputs = 64;

// Queues on `stream` what FoldMean() does, for arrays in device memory, in one launch: each input
// is read once, `out` written once. All pointers must be aligned to their elements; when all have
// the same distance from multiples of 16 bytes, accesses are of 16 bytes. `out` must not overlap an
// input unless it is exactly inputs[k] and the types are equal. The supported pairs of types are
// those of FoldMean(). Adds to `*nonfinite`, in device memory, how many results are NaN or
// infinite. Does not wait. Returns InvalidArgument when there is no input or more than
// kMaxDeviceFoldInputs, not as many weights, or the types are no supported pair; Internal when CUDA
// cannot launch. Thread-safe.
absl::Status FoldMeanOnDevice(CudaStream stream, std::span<const void* const> inputs,
                              std::span<const float> weights, float divisor, DType in,
                              DType out_type, void* out, uint64_t elems, uint64_t* nonfinite);

}  // namespace thalweg
