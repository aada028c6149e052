#include <gmock/gmock.h>
#include <sys/mman.h>

#include <algorithm>
#include <vector>

#include "core/device/gpu_test.h"

namespace thalweg::cuda_runtime_gpu_test {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

constexpr size_t kBytes = size_t{8} << 20;

class CudaRuntimeGpuTest : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    void* const memory =
        mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(memory, MAP_FAILED);
    host_ = static_cast<std::byte*>(memory);
    stream_ = *device_->CreateStream();
    other_ = *device_->CreateStream();
  }
  void TearDown() override {
    GpuTest::TearDown();
    if (device_ == nullptr) return;
    device_->DestroyStream(stream_);
    device_->DestroyStream(other_);
    munmap(host_, kBytes);
  }

  std::byte* host_ = nullptr;
  DeviceStream stream_ = nullptr;
  DeviceStream other_ = nullptr;
};

TEST_F(CudaRuntimeGpuTest, BytesGoThereAndBackThroughLockedMemory) {
  ASSERT_TRUE(device_->RegisterHost(host_, kBytes, DeviceRuntime::Access::kReadWrite).ok());
  for (size_t i = 0; i < kBytes; ++i) host_[i] = static_cast<std::byte>(i * 7 + i / 256);
  const std::vector<std::byte> sent(host_, host_ + kBytes);
  std::byte* const memory = Allocate(kBytes);
  ASSERT_TRUE(device_->CopyToDevice(memory, host_, kBytes, stream_).ok());
  Synchronize(stream_);
  std::fill_n(host_, kBytes, std::byte{0});
  ASSERT_TRUE(device_->CopyToHost(host_, memory, kBytes, stream_).ok());
  Synchronize(stream_);
  EXPECT_TRUE(std::equal(sent.begin(), sent.end(), host_));
  EXPECT_TRUE(device_->Check(stream_).ok());
  device_->UnregisterHost(host_);
}

TEST_F(CudaRuntimeGpuTest, StreamThatWaitsForAnEventSeesWhatCameBeforeIt) {
  std::byte* const memory = Allocate(kBytes);
  Fill(memory, 1, kBytes, stream_);
  Synchronize(stream_);
  const DeviceEvent event = *device_->CreateEvent();
  KeepBusy(stream_);
  Fill(memory, 2, kBytes, stream_);
  ASSERT_TRUE(device_->Record(event, stream_).ok());
  ASSERT_TRUE(device_->Wait(other_, event).ok());
  std::byte* const seen = Allocate(kBytes);
  ASSERT_EQ(cudaMemcpyAsync(seen, memory, kBytes, cudaMemcpyDeviceToDevice,
                            reinterpret_cast<cudaStream_t>(other_)),
            cudaSuccess);
  device_->DestroyEvent(event);  // destroying it before it is reached is allowed
  std::vector<std::byte> values(kBytes);
  ASSERT_TRUE(device_->CopyToHost(values.data(), seen, kBytes, other_).ok());
  Synchronize(other_);
  EXPECT_THAT(values, Each(std::byte{2}));
}

TEST_F(CudaRuntimeGpuTest, FunctionIsCalledWhenItsStreamGetsThere) {
  ASSERT_TRUE(device_->RegisterHost(host_, kBytes, DeviceRuntime::Access::kReadWrite).ok());
  std::byte* const memory = Allocate(kBytes);
  KeepBusy(stream_);
  Fill(memory, 3, kBytes, stream_);
  ASSERT_TRUE(device_->CopyToHost(host_, memory, kBytes, stream_).ok());
  struct Seen {
    std::byte* host;
    std::byte last{0};
  } seen{host_};
  const auto look = [](void* argument) {
    auto* const s = static_cast<Seen*>(argument);
    s->last = s->host[kBytes - 1];
  };
  ASSERT_TRUE(device_->Launch(stream_, look, &seen).ok());
  Synchronize(stream_);
  EXPECT_EQ(seen.last, std::byte{3});
  device_->UnregisterHost(host_);
}

TEST_F(CudaRuntimeGpuTest, FailedCallIsNamedAndSpoilsNothing) {
  ASSERT_TRUE(device_->RegisterHost(host_, kBytes, DeviceRuntime::Access::kReadWrite).ok());
  const absl::Status twice =
      device_->RegisterHost(host_, kBytes, DeviceRuntime::Access::kReadWrite);
  EXPECT_THAT(std::string(twice.message()),
              AllOf(HasSubstr("cudaHostRegister"), HasSubstr("AlreadyRegistered")));
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
  EXPECT_TRUE(device_->Check(stream_).ok());
  device_->UnregisterHost(host_);
}

}  // namespace
}  // namespace thalweg::cuda_runtime_gpu_test
