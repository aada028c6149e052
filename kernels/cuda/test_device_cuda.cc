#include <cuda_runtime_api.h>

#include "absl/strings/str_cat.h"
#include "kernels/launch/status.h"
#include "kernels/launch/test_device.h"

namespace thalweg {

absl::Status CheckDevice() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    return absl::UnavailableError(absl::StrCat("no GPU: ", cudaGetErrorString(error)));
  }
  if (count == 0) return absl::UnavailableError("no GPU: the driver knows none");
  return absl::OkStatus();
}

absl::Status FinishDevice() { return LaunchStatus(cudaDeviceSynchronize(), "the device"); }

DeviceBuffer::DeviceBuffer(size_t bytes, size_t misalignment)
    : misalignment_(misalignment), bytes_(bytes) {
  void* memory = nullptr;
  EXPECT_EQ(cudaMalloc(&memory, bytes + misalignment + 1), cudaSuccess) << bytes << " bytes";
  memory_ = static_cast<std::byte*>(memory);
}

DeviceBuffer::~DeviceBuffer() { EXPECT_EQ(cudaFree(memory_), cudaSuccess); }

void DeviceBuffer::Fill(const std::vector<std::byte>& content) {
  ASSERT_EQ(content.size(), bytes_);
  ASSERT_EQ(cudaMemcpy(Data(), content.data(), bytes_, cudaMemcpyHostToDevice), cudaSuccess);
}

std::vector<std::byte> DeviceBuffer::Content() const {
  std::vector<std::byte> content(bytes_);
  EXPECT_EQ(cudaMemcpy(content.data(), Data(), bytes_, cudaMemcpyDeviceToHost), cudaSuccess);
  return content;
}

}  // namespace thalweg
