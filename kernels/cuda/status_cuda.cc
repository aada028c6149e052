#include <cuda_runtime_api.h>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/status.h"

namespace thalweg {

absl::Status LaunchStatus(LaunchError error, absl::string_view what) {
  if (error == cudaSuccess) return absl::OkStatus();
  // Launches learn of theirs from cudaGetLastError(): the thread's next one would find this again.
  cudaGetLastError();
  const auto code = static_cast<cudaError_t>(error);
  return absl::InternalError(
      absl::StrCat(what, ": CUDA error ", error, ", ", cudaGetErrorString(code)));
}

}  // namespace thalweg
