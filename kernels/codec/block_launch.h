// This header connects block_cuda.cc, which makes a Status of errors, and the kernels of the
// formats whose payloads are blocks. Each such format of the registry (core/base/lossy_formats.h)
// has a function <Name>Launches(), which the format's folder defines.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/base/lossy_formats.h"
#include "kernels/launch/stream.h"

namespace thalweg {

// The encoded x is values + residual, or values when `residual` is null.
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

struct BlockLaunches {
  LaunchError (*encode)(CudaStream stream, const BlockEncoding& work);
  LaunchError (*decode)(CudaStream stream, const BlockDecoding& work);
};

#define THALWEG_DECLARE_LAUNCHES(Name, ...) BlockLaunches Name##Launches();
THALWEG_BLOCK_FORMATS(THALWEG_DECLARE_LAUNCHES)
#undef THALWEG_DECLARE_LAUNCHES

}  // namespace thalweg
