// Between block_cuda.cc, which makes a Status of errors, and the kernels of int8 and onebit.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/stream.h"

namespace thalweg {

// x = values + residual, or values when `residual` is null.
struct BlockEncoding {
  const float* values;
  float* residual;
  uint64_t elems;
  std::byte* out;
  uint64_t* nonfinite;
};

struct BlockDecoding {
  const std::byte* in;
  uint64_t elems;
  float* out;
};

LaunchError LaunchEncodeInt8(CudaStream stream, const BlockEncoding& work);
LaunchError LaunchDecodeInt8(CudaStream stream, const BlockDecoding& work);
LaunchError LaunchEncodeOneBit(CudaStream stream, const BlockEncoding& work);
LaunchError LaunchDecodeOneBit(CudaStream stream, const BlockDecoding& work);

}  // namespace thalweg
