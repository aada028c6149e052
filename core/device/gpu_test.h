// GpuTest adds to DeviceRuntime what tests on a real GPU need. Without a GPU they are skipped with
// the reason; tests with FakeRuntime show order and lifetimes there.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "core/device/device_runtime.h"

namespace thalweg {

// The tests use device 0, which is the test thread's current device.
class GpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto device = OpenCudaDevice(0);
    if (!device.ok()) GTEST_SKIP() << device.status().message();
    device_ = *std::move(device);
    ASSERT_TRUE(device_->BindThread().ok());
  }
  void TearDown() override {
    if (device_ == nullptr) return;
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    for (std::byte* memory : allocated_) cudaFree(memory);
  }

  // Allocates memory that lives until the test ends.
  std::byte* Allocate(size_t bytes) {
    void* memory = nullptr;
    EXPECT_EQ(cudaMalloc(&memory, bytes), cudaSuccess) << bytes << " bytes";
    allocated_.push_back(static_cast<std::byte*>(memory));
    return allocated_.back();
  }

  // Queues milliseconds of work, so that a reader that should wait for the stream and does not
  // comes too early: 64 GiB, of which no GPU writes more than 8 TB/s, in few calls, which take long
  // under compute-sanitizer.
  void KeepBusy(DeviceStream stream) {
    constexpr size_t kBytes = size_t{1} << 30;
    if (scratch_ == nullptr) scratch_ = Allocate(kBytes);
    for (int i = 0; i < 64; ++i) Fill(scratch_, i, kBytes, stream);
  }
  // Queues a kernel that sets each byte to `value`.
  static void Fill(std::byte* memory, int value, size_t bytes, DeviceStream stream) {
    EXPECT_EQ(cudaMemsetAsync(memory, value, bytes, reinterpret_cast<cudaStream_t>(stream)),
              cudaSuccess);
  }
  static void Synchronize(DeviceStream stream) {
    EXPECT_EQ(cudaStreamSynchronize(reinterpret_cast<cudaStream_t>(stream)), cudaSuccess);
  }

  std::shared_ptr<DeviceRuntime> device_;

 private:
  std::byte* scratch_ = nullptr;
  std::vector<std::byte*> allocated_;
};

}  // namespace thalweg
