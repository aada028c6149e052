// This header declares what callers of the CUDA kernels need of CUDA, without CUDA's headers.
#pragma once

struct CUstream_st;

namespace thalweg {

// The same type as cudaStream_t; null is the default stream.
using CudaStream = CUstream_st*;

// 0 is success. On a GPU it is a cudaError_t; kernels/launch/status.h makes a Status of it.
using LaunchError = int;

}  // namespace thalweg
