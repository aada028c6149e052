// Gradients in host memory, folded with SIMD by the calling thread.
#pragma once

#include "server/sidecar/device/device.h"

namespace thalweg {

class CpuDevice : public Device {
 public:
  uint64_t Encode(std::span<const void* const> shares, DType share, DType wire, size_t elems,
                  void* out) override;
  absl::Status Decode(const Payload& result, DType wire, DType bucket, size_t elems,
                      void* out) override;
};

}  // namespace thalweg
