// This header connects cast_cuda.cc, which checks arguments, and cast_cuda.cu, which has the
// kernel.
#pragma once

#include <cstdint>

#include "kernels/launch/stream.h"

namespace thalweg {

// From and To are element types of kernels/cast/element.h.
template <class From, class To>
LaunchError LaunchCast(CudaStream stream, const void* in, void* out, uint64_t elems);

LaunchError LaunchCopy(CudaStream stream, const void* in, void* out, uint64_t bytes);

}  // namespace thalweg
