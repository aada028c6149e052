// CastOnDevice does the conversions of kernels/cast/cast.h on a GPU: same contract, same bits.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "core/base/dtype.h"
#include "kernels/launch/stream.h"

namespace thalweg {

// Queues on `stream` what Cast() does, for arrays in device memory, in one launch or one copy that
// reads `in` once and writes `out` once. Supported: fp32 ↔ fp16, fp32 ↔ bf16, and equal types. Both
// must be aligned to their elements; when both reach multiples of 16 bytes at the same elements,
// accesses are of 16 bytes. They must not overlap. Does not wait.
// InvalidArgument when the types are no supported pair; Internal when CUDA cannot launch.
// Thread-safe.
absl::Status CastOnDevice(CudaStream stream, DType from, const void* in, DType to, void* out,
                          uint64_t elems);

}  // namespace thalweg
