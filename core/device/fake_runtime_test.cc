#include "core/device/fake_runtime.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>
#include <future>

namespace thalweg::fake_runtime_test {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Call = FakeRuntime::Call;

constexpr size_t kBytes = 4096;

class FakeRuntimeTest : public ::testing::Test {
 protected:
  FakeRuntimeTest() {
    EXPECT_TRUE(device_.BindThread().ok());
    host_ = static_cast<std::byte*>(
        mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    stream_ = *device_.CreateStream();
    memory_ = device_.Allocate(kBytes);
  }
  ~FakeRuntimeTest() override { munmap(host_, kBytes); }

  void Register() {
    EXPECT_TRUE(device_.RegisterHost(host_, kBytes, DeviceRuntime::Access::kReadWrite).ok());
  }

  FakeRuntime device_;
  std::byte* host_ = nullptr;
  DeviceStream stream_ = nullptr;
  std::span<std::byte> memory_;
};

TEST_F(FakeRuntimeTest, StreamsWaitOnlyForEventsTheyWereToldToWaitFor) {
  Register();
  const DeviceStream other = *device_.CreateStream();
  const DeviceEvent event = *device_.CreateEvent();
  const auto inside = device_.Inside(memory_);
  device_.Hold(stream_);
  device_.Run(stream_, [inside] { inside[0] = std::byte{7}; });
  ASSERT_TRUE(device_.Record(event, stream_).ok());
  ASSERT_TRUE(device_.CopyToHost(host_, memory_.data(), 1, other).ok());  // does not wait
  ASSERT_TRUE(device_.Wait(other, event).ok());
  ASSERT_TRUE(device_.CopyToHost(host_ + 1, memory_.data(), 1, other).ok());
  device_.Settle();
  EXPECT_EQ(device_.copied_bytes(Call::kCopyToHost), 1u);
  device_.Release(stream_);
  device_.Settle();
  EXPECT_NE(host_[0], std::byte{7});
  EXPECT_EQ(host_[1], std::byte{7});
  EXPECT_THAT(device_.violations(), IsEmpty());
}

TEST_F(FakeRuntimeTest, HostThatTouchesDeviceMemoryDies) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(std::memset(memory_.data(), 1, 1), "");
}

TEST_F(FakeRuntimeTest, CopyOutOfBoundsOrTheWrongWayIsAViolation) {
  Register();
  EXPECT_FALSE(device_.CopyToHost(host_, memory_.data() + 1, kBytes, stream_).ok());
  EXPECT_FALSE(device_.CopyToHost(memory_.data(), host_, kBytes, stream_).ok());
  EXPECT_EQ(device_.violations().size(), 2u);
}

TEST_F(FakeRuntimeTest, MemoryThatGoesBeforeItsCopyIsAViolation) {
  Register();
  device_.Hold(stream_);
  ASSERT_TRUE(device_.CopyToHost(host_, memory_.data(), 1, stream_).ok());
  ASSERT_TRUE(device_.CopyToHost(host_, memory_.data(), 1, stream_).ok());
  device_.UnregisterHost(host_);
  device_.Release(stream_);
  device_.Settle();
  EXPECT_THAT(device_.violations(), Contains(HasSubstr("unregistered before")).Times(2));
  Register();
  device_.Hold(stream_);
  ASSERT_TRUE(device_.CopyToDevice(memory_.data(), host_, 1, stream_).ok());
  device_.Free(memory_);
  device_.Release(stream_);
  device_.Settle();
  EXPECT_THAT(device_.violations(), Contains(HasSubstr("freed before")));
}

TEST_F(FakeRuntimeTest, PageableCopyMakesItsCallerWait) {
  ASSERT_TRUE(device_.CopyToHost(host_, memory_.data(), 1, stream_).ok());
  EXPECT_EQ(device_.copied_bytes(Call::kCopyToHost), 1u);
  EXPECT_EQ(device_.pageable_copies(), 1u);
}

TEST_F(FakeRuntimeTest, CopiesBeyondALimitWaitForTheNext) {
  Register();
  device_.LimitCopies(FakeRuntime::Call::kCopyToHost, 1);
  for (size_t i = 0; i < 3; ++i) {
    ASSERT_TRUE(device_.CopyToHost(host_ + i, &memory_[i], 1, stream_).ok());
  }
  device_.Settle();
  EXPECT_EQ(device_.copied_bytes(FakeRuntime::Call::kCopyToHost), 1u);
  device_.LimitCopies(FakeRuntime::Call::kCopyToHost, std::nullopt);
  device_.Settle();
  EXPECT_EQ(device_.copied_bytes(FakeRuntime::Call::kCopyToHost), 3u);
}

TEST_F(FakeRuntimeTest, LaunchedFunctionThatCallsTheRuntimeIsAViolation) {
  ASSERT_TRUE(
      device_
          .Launch(
              stream_,
              [](void* device) { static_cast<FakeRuntime*>(device)->BindThread().IgnoreError(); },
              &device_)
          .ok());
  device_.Settle();
  EXPECT_THAT(device_.violations(), Contains(HasSubstr("launched function")));
}

TEST_F(FakeRuntimeTest, FailedDeviceDropsItsWorkAndAnswersNothingElse) {
  Register();
  bool called = false;
  device_.Hold(stream_);
  ASSERT_TRUE(
      device_.Launch(stream_, [](void* flag) { *static_cast<bool*>(flag) = true; }, &called).ok());
  device_.FailDevice(absl::InternalError("lost"));
  device_.Release(stream_);
  device_.Settle();
  EXPECT_FALSE(called);
  EXPECT_EQ(device_.Check(stream_).message(), "lost");
  EXPECT_EQ(device_.CreateEvent().status().message(), "lost");
}

TEST_F(FakeRuntimeTest, SharedMemoryIsOpenUntilItIsClosedAndIsNotWhateverSomebodySends) {
  void* const memory = *device_.AllocateMemory(kSharedMemoryGranule);
  const std::string shared = *device_.ShareMemory(memory);
  EXPECT_EQ(*device_.OpenMemory(shared), memory);
  EXPECT_EQ(device_.opened(), 1u);
  device_.CloseMemory(memory);
  EXPECT_EQ(device_.opened(), 0u);
  for (const char* wrong : {"", "memory", "memory 12", "event 12"}) {
    EXPECT_EQ(device_.OpenMemory(wrong).status().code(), absl::StatusCode::kInvalidArgument);
  }
  device_.FreeMemory(memory);
  EXPECT_EQ(device_.OpenMemory(shared).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(device_.violations(), IsEmpty());
}

TEST_F(FakeRuntimeTest, SharingLessThanAGranuleIsAViolation) {
  EXPECT_TRUE(device_.ShareMemory(*device_.AllocateMemory(kBytes)).ok());
  EXPECT_THAT(device_.violations(), Contains(HasSubstr("granules")));
}

TEST_F(FakeRuntimeTest, OpenedEventIsReachedWhenTheSharedOneIs) {
  const DeviceEvent event = *device_.CreateSharedEvent();
  const DeviceEvent opened = *device_.OpenEvent(*device_.ShareEvent(event));
  const DeviceStream other = *device_.CreateStream();
  bool done = false;
  device_.Hold(stream_);
  ASSERT_TRUE(device_.Record(event, stream_).ok());
  ASSERT_TRUE(device_.Wait(other, opened).ok());
  device_.Run(other, [&done] { done = true; });
  device_.Settle();
  EXPECT_FALSE(done);
  device_.Release(stream_);
  device_.Settle();
  EXPECT_TRUE(done);
}

TEST_F(FakeRuntimeTest, KernelInPlaceUsesDeviceMemoryByItsAddress) {
  std::byte* const address = memory_.data();
  device_.RunInPlace(stream_, [address] { address[5] = std::byte{9}; });
  Register();
  ASSERT_TRUE(device_.CopyToHost(host_, address, kBytes, stream_).ok());
  device_.Settle();
  EXPECT_EQ(host_[5], std::byte{9});
  EXPECT_DEATH(address[5] = std::byte{1}, "");
}

TEST_F(FakeRuntimeTest, KernelInPlaceUsesWhatWasAllocatedWhileAnotherRan) {
  const DeviceStream other = *device_.CreateStream();
  std::promise<void> running;
  std::promise<void> written;
  device_.RunInPlace(stream_, [&] {
    running.set_value();
    written.get_future().wait();
  });
  running.get_future().wait();
  std::byte* const address = device_.Allocate(kBytes).data();
  device_.RunInPlace(other, [&, address] {
    address[5] = std::byte{9};
    written.set_value();
  });
  Register();
  ASSERT_TRUE(device_.CopyToHost(host_, address, kBytes, other).ok());
  device_.Settle();
  EXPECT_EQ(host_[5], std::byte{9});
  EXPECT_DEATH(address[5] = std::byte{1}, "");
}

}  // namespace
}  // namespace thalweg::fake_runtime_test
