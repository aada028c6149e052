// What a caller of the CUDA kernels needs to know of CUDA, without CUDA's headers.
#pragma once

struct CUstream_st;

namespace thalweg {

// The same type as cudaStream_t; null is the default stream.
using CudaStream = CUstream_st*;

// 0 is success. A cudaError_t on a GPU; kernels/cuda/status.h makes a Status of it.
using LaunchError = int;

}  // namespace thalweg
