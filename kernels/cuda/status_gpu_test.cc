#include <cuda_runtime_api.h>

#include "kernels/launch/status.h"
#include "kernels/launch/test_device.h"

namespace thalweg::status_gpu_test {
namespace {

class LaunchStatusTest : public DeviceTest {};

TEST_F(LaunchStatusTest, ErrorIsNotFoundAgainByTheNextLaunch) {
  const cudaError_t error = cudaMemsetAsync(nullptr, 0, 1, nullptr);
  ASSERT_EQ(error, cudaErrorInvalidValue);
  ASSERT_EQ(cudaPeekAtLastError(), error);
  EXPECT_FALSE(LaunchStatus(error, "a fill").ok());
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
}

}  // namespace
}  // namespace thalweg::status_gpu_test
