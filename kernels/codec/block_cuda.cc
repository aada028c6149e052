#include "kernels/codec/block_launch.h"
#include "kernels/codec/int8/int8_cuda.h"
#include "kernels/codec/onebit/onebit_cuda.h"
#include "kernels/cuda/status.h"

namespace thalweg {

absl::Status EncodeInt8OnDevice(CudaStream stream, const float* values, float* residual,
                                uint64_t elems, std::byte* out, uint64_t* nonfinite) {
  return LaunchStatus(LaunchEncodeInt8(stream, {values, residual, elems, out, nonfinite}),
                      "device encode of int8");
}

absl::Status DecodeInt8OnDevice(CudaStream stream, const std::byte* in, uint64_t elems,
                                float* decoded) {
  return LaunchStatus(LaunchDecodeInt8(stream, {in, elems, decoded}), "device decode of int8");
}

absl::Status EncodeOneBitOnDevice(CudaStream stream, const float* values, float* residual,
                                  uint64_t elems, std::byte* out, uint64_t* nonfinite) {
  return LaunchStatus(LaunchEncodeOneBit(stream, {values, residual, elems, out, nonfinite}),
                      "device encode of onebit");
}

absl::Status DecodeOneBitOnDevice(CudaStream stream, const std::byte* in, uint64_t elems,
                                  float* decoded) {
  return LaunchStatus(LaunchDecodeOneBit(stream, {in, elems, decoded}), "device decode of onebit");
}

}  // namespace thalweg
