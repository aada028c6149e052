#include "client/core/ipc_path.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <utility>
#include <vector>

#include "core/base/testing/test_patience.h"
#include "core/device/fake_runtime.h"

namespace thalweg::ipc_path_test {
namespace {

using ::testing::IsEmpty;
using Call = FakeRuntime::Call;

constexpr size_t kElems = 1000;
constexpr size_t kBytes = kElems * sizeof(float);

// The fixture has a session's side of the path; a stream and the memory of the result replace the
// sidecar.
class IpcPathTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(device_->BindThread().ok());
    path_ = *IpcPath::Create(device_);
    producer_ = *device_->CreateStream();
    sidecar_ = *device_->CreateStream();
    gradient_ = {device_->Allocate(kBytes), producer_, owner_};
    result_ = *device_->AllocateMemory(kSharedMemoryGranule);
    result_made_ = *device_->CreateSharedEvent();
    lane_ = *path_->OpenLane(nullptr, kBytes);
    share_ = *device_->OpenMemory(lane_->memory().memory);
    shared_ = *device_->OpenEvent(lane_->memory().event);
    ASSERT_TRUE(path_
                    ->SetResult(*lane_, {device_->uuid(), *device_->ShareMemory(result_),
                                         *device_->ShareEvent(result_made_)})
                    .ok());
  }
  void TearDown() override { EXPECT_THAT(device_->violations(), IsEmpty()); }

  // Streams are numbered in the order in which a path makes them.
  DeviceStream out() { return device_->stream(0); }
  DeviceStream in() { return device_->stream(1); }

  std::span<std::byte> Inside(void* memory) {
    return device_->Inside({static_cast<std::byte*>(memory), kBytes});
  }
  static void Fill(std::span<std::byte> memory, float value) {
    std::fill_n(reinterpret_cast<float*>(memory.data()), kElems, value);
  }
  static bool All(std::span<std::byte> memory, float value) {
    const auto* values = reinterpret_cast<const float*>(memory.data());
    return std::all_of(values, values + kElems, [=](float v) { return v == value; });
  }
  void Make(float value) {
    device_->Run(producer_,
                 [inside = device_->Inside(gradient_.bytes), value] { Fill(inside, value); });
  }
  // Computes the sidecar's result on its stream: what it was sent, plus 1.
  void Answer() {
    ASSERT_TRUE(device_->Wait(sidecar_, shared_).ok());
    device_->Run(sidecar_, [from = Inside(share_), to = Inside(result_)] {
      Fill(to, *reinterpret_cast<const float*>(from.data()) + 1);
    });
    ASSERT_TRUE(device_->Record(result_made_, sidecar_).ok());
  }

  const std::shared_ptr<FakeRuntime> device_ = std::make_shared<FakeRuntime>();
  std::unique_ptr<IpcPath> path_;
  std::shared_ptr<IpcPath::Lane> lane_;
  std::shared_ptr<int> owner_ = std::make_shared<int>();
  DeviceStream producer_ = nullptr;
  DeviceStream sidecar_ = nullptr;
  DeviceGradient gradient_;
  const ChunkPlan plan_;
  void* result_ = nullptr;
  DeviceEvent result_made_ = nullptr;
  void* share_ = nullptr;
  DeviceEvent shared_ = nullptr;
};

TEST_F(IpcPathTest, RoundsGoThereAndBackWithoutLeavingTheDevice) {
  for (float round = 1; round <= 3; ++round) {
    Make(10 * round);
    ASSERT_TRUE(path_->Send(lane_, gradient_, plan_).ok());
    Answer();
    ASSERT_TRUE(device_->Wait(producer_, *path_->Fetch(lane_, nullptr, gradient_)).ok());
    device_->Settle();
    EXPECT_TRUE(All(device_->Inside(gradient_.bytes), 10 * round + 1));
  }
  EXPECT_EQ(device_->copied_bytes(Call::kCopyToHost), 0u);
}

TEST_F(IpcPathTest, SidecarSeesTheGradientOnlyWhenTheProducerHasMadeIt) {
  device_->Hold(producer_);
  Make(5);
  ASSERT_TRUE(path_->Send(lane_, gradient_, plan_).ok());
  Answer();
  device_->Settle();
  EXPECT_FALSE(All(Inside(result_), 6));
  device_->Release(producer_);
  device_->Settle();
  EXPECT_TRUE(All(Inside(result_), 6));
}

TEST_F(IpcPathTest, ResultIsTakenOnlyWhenTheSidecarHasMadeIt) {
  Make(5);
  ASSERT_TRUE(path_->Send(lane_, gradient_, plan_).ok());
  device_->Settle();
  device_->Hold(sidecar_);
  Answer();
  ASSERT_TRUE(path_->Fetch(lane_, nullptr, gradient_).ok());
  device_->Settle();
  EXPECT_TRUE(All(device_->Inside(gradient_.bytes), 5));
  device_->Release(sidecar_);
  device_->Settle();
  EXPECT_TRUE(All(device_->Inside(gradient_.bytes), 6));
}

TEST_F(IpcPathTest, NextRoundWaitsUntilTheLastResultHasBeenTaken) {
  Make(5);
  ASSERT_TRUE(path_->Send(lane_, gradient_, plan_).ok());
  Answer();
  device_->Settle();
  device_->Hold(in());
  ASSERT_TRUE(path_->Fetch(lane_, nullptr, gradient_).ok());
  Make(7);  // as a producer that does not wait for the result
  ASSERT_TRUE(path_->Send(lane_, gradient_, plan_).ok());
  Answer();
  device_->Settle();
  EXPECT_TRUE(All(Inside(result_), 6)) << "overwritten before it was taken";
  device_->Release(in());
  device_->Settle();
  EXPECT_TRUE(All(device_->Inside(gradient_.bytes), 6));
}

TEST_F(IpcPathTest, NothingIsFreedWhileACopyUsesIt) {
  const std::weak_ptr<int> owner = owner_;
  const std::weak_ptr<IpcPath::Lane> lane = lane_;
  device_->Hold(out());
  Make(5);
  ASSERT_TRUE(path_->Send(lane_, gradient_, plan_).ok());
  lane_.reset();
  owner_.reset();
  gradient_.owner.reset();
  device_->Settle();
  EXPECT_FALSE(owner.expired());
  EXPECT_FALSE(lane.expired());
  device_->Release(out());
  device_->Settle();
  device_->CloseMemory(share_);  // as the sidecar does before it hangs up
  EXPECT_TRUE(path_->Close(Now() + kTestPatience));
  EXPECT_TRUE(owner.expired());
  EXPECT_TRUE(lane.expired());
}

TEST_F(IpcPathTest, WhatADeviceThatHasFailedMayStillUseIsLeftBehind) {
  device_->Hold(out());
  Make(5);
  ASSERT_TRUE(path_->Send(lane_, gradient_, plan_).ok());
  device_->FailDevice(absl::InternalError("lost"));
  EXPECT_EQ(path_->Check().message(), "lost");
  EXPECT_FALSE(path_->Close(Now() + kTestPatience));
  const std::weak_ptr<IpcPath::Lane> lane = std::exchange(lane_, nullptr);
  path_.reset();
  EXPECT_FALSE(lane.expired());
}

TEST_F(IpcPathTest, ProbeHoldsWhatTheSidecarExpects) {
  auto* const memory = static_cast<std::byte*>(*device_->OpenMemory(path_->probe().memory));
  device_->Settle();
  const auto inside = device_->Inside({memory, sizeof(kDeviceProbe)});
  EXPECT_EQ(std::memcmp(inside.data(), kDeviceProbe, sizeof(kDeviceProbe)), 0);
}

TEST_F(IpcPathTest, DeviceThatCannotShareSaysSo) {
  const auto other = std::make_shared<FakeRuntime>();
  ASSERT_TRUE(other->BindThread().ok());
  other->FailAt(Call::kShare, 1, absl::UnimplementedError("no IPC here"));
  EXPECT_EQ(IpcPath::Create(other).status().message(), "no IPC here");
  EXPECT_EQ(other->allocated(), 0u);
  EXPECT_THAT(other->violations(), IsEmpty());
}

}  // namespace
}  // namespace thalweg::ipc_path_test
