#include "kernels/reduce/norm_cuda.h"

#include "kernels/launch/status.h"
#include "kernels/reduce/norm_launch.h"

namespace thalweg {

uint64_t SquaredNormPartials(uint64_t elems) { return (elems + kNormStretch - 1) / kNormStretch; }

absl::Status SquaredNormOnDevice(CudaStream stream, const float* a, const float* b, uint64_t elems,
                                 double* partials) {
  return LaunchStatus(LaunchSquaredNorm(stream, {a, b, elems, partials}), "device squared norm");
}

}  // namespace thalweg
