#include "server/sidecar/device/cpu_device.h"

#include <vector>

#include "kernels/codec/codec.h"
#include "kernels/reduce/reduce.h"

namespace thalweg {

uint64_t CpuDevice::Encode(std::span<const void* const> shares, DType share, DType wire,
                           size_t elems, void* out) {
  const std::vector<float> weights(shares.size(), 1.0f);
  return FoldMean(shares, weights, static_cast<float>(shares.size()), share, wire, out, elems);
}

absl::Status CpuDevice::Decode(const Payload& result, DType wire, DType bucket, size_t elems,
                               void* out) {
  return DecodePayload(result, wire, bucket, elems, out);
}

}  // namespace thalweg
