// CpuDevice handles gradients in host memory, which workers share with the sidecar; the calling
// thread works on them with SIMD.
#pragma once

#include "server/sidecar/device/device.h"

namespace thalweg {

class CpuDevice final : public Device {
 public:
  absl::Status Probe(const DeviceMemory& probe) override;
  absl::StatusOr<std::unique_ptr<BucketMemory>> MakeMemory(const MemoryTerms& terms) override;
};

}  // namespace thalweg
