// This header computes squared norms of arrays in a GPU's memory.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/launch/stream.h"

namespace thalweg {

// Returns how many partial sums SquaredNormOnDevice() makes.
uint64_t SquaredNormPartials(uint64_t elems);

// Queues on `stream`, in one launch, the sums of (a[i] + b[i])² over equal ranges of the arrays,
// each in float64 and in one fixed order. Adding up the partial sums from the first gives the
// squared norm of a + b, with the same bits every time. A null `b` counts as zeros. The arrays are
// in device memory and aligned to their elements; each is read once, nothing waits. Returns
// Internal when CUDA cannot launch. Thread-safe.
absl::Status SquaredNormOnDevice(CudaStream stream, const float* a, const float* b, uint64_t elems,
                                 double* partials);

}  // namespace thalweg
