// This header connects norm_cuda.cc and norm_cuda.cu, which has the kernel.
#pragma once

#include <cstdint>

#include "kernels/launch/stream.h"

namespace thalweg {

inline constexpr uint64_t kNormStretch = 64 << 10;  // elements of one partial sum

struct NormWork {
  const float* a;
  const float* b;  // may be null
  uint64_t elems;
  double* partials;
};

LaunchError LaunchSquaredNorm(CudaStream stream, const NormWork& work);

}  // namespace thalweg
