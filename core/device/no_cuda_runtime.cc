#include "absl/strings/str_cat.h"
#include "core/device/device_runtime.h"

namespace thalweg {

int CountCudaDevices() { return 0; }

absl::StatusOr<std::shared_ptr<DeviceRuntime>> OpenCudaDevice(int number) {
  return absl::UnimplementedError(absl::StrCat(
      "cuda:", number, " cannot be used: this build of Thalweg has no CUDA; configure it with ",
      "-DTHALWEG_CUDA=ON, or train on the CPU"));
}

}  // namespace thalweg
