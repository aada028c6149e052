#include <cuda_runtime_api.h>

#include "absl/strings/str_cat.h"
#include "kernels/launch/status.h"

namespace thalweg {

absl::Status LaunchStatus(LaunchError error, absl::string_view what) {
  if (error == cudaSuccess) return absl::OkStatus();
  // Launches get their errors from cudaGetLastError(): without this the thread's next launch would
  // find this one again.
  cudaGetLastError();
  const auto code = static_cast<cudaError_t>(error);
  return absl::InternalError(
      absl::StrCat(what, ": CUDA error ", error, ", ", cudaGetErrorString(code)));
}

}  // namespace thalweg
