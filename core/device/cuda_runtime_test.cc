#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <vector>

#include "core/device/device_runtime.h"

namespace thalweg::cuda_runtime_test {
namespace {

using ::testing::HasSubstr;

TEST(CudaRuntimeTest, DeviceThatIsNotThereIsNamedAsAnError) {
  const auto device = OpenCudaDevice(4711);
  ASSERT_FALSE(device.ok());
  EXPECT_THAT(std::string(device.status().message()), HasSubstr("cuda:4711 cannot be used"));
}

}  // namespace
}  // namespace thalweg::cuda_runtime_test
