#include "server/bin/gpus.h"

#include <spdlog/spdlog.h>

#include <cstdlib>
#include <utility>
#include <vector>

#include "core/device/nccl_group.h"
#include "server/base/log.h"
#include "server/sidecar/cuda/cuda_device.h"

namespace thalweg {
namespace {

// NCCL takes a second or two to connect the GPUs of a node.
constexpr Duration kConnectPatience = std::chrono::seconds(30);

}  // namespace

std::unique_ptr<Device> OpenGpus() {
  // CUDA reads these when it starts. Streams that share one of the hardware's queues wait for each
  // other's work, and each bucket has two; kernels that are loaded when they are first launched may
  // wait for streams that wait for workers.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", /*overwrite=*/0);
  setenv("CUDA_MODULE_LOADING", "EAGER", /*overwrite=*/0);
  std::vector<std::shared_ptr<DeviceRuntime>> gpus;
  for (int number = 0; number < CountCudaDevices(); ++number) {
    auto gpu = OpenCudaDevice(number);
    if (gpu.ok()) {
      gpus.push_back(*std::move(gpu));
    } else {
      spdlog::warn("GPU {} cannot be used, continuing without it: {}", number, Text(gpu.status()));
    }
  }
  if (gpus.empty()) return nullptr;
  spdlog::info("found {} GPUs", gpus.size());
  return std::make_unique<CudaDevice>(std::move(gpus), [](const auto& members) {
    return OpenNcclGroup(members, kConnectPatience);
  });
}

}  // namespace thalweg
