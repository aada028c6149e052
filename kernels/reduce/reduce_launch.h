// This header connects reduce_cuda.cc, which checks arguments, and reduce_cuda.cu, which has the
// kernel.
#pragma once

#include <cstdint>

#include "kernels/launch/stream.h"
#include "kernels/reduce/divide.h"

namespace thalweg {

inline constexpr int kMaxFoldInputs = 64;

struct FoldWork {
  const void* inputs[kMaxFoldInputs] = {};
  float weights[kMaxFoldInputs] = {};
  uint32_t count = 0;
  Divisor divisor;
  void* out = nullptr;
  uint64_t elems = 0;
  uint64_t* nonfinite = nullptr;
};

// In and Out are element types of kernels/cast/element.h.
template <class In, class Out>
LaunchError LaunchFold(CudaStream stream, const FoldWork& work);

}  // namespace thalweg
