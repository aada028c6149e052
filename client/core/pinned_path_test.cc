#include "client/core/pinned_path.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <utility>
#include <vector>

#include "core/base/testing/test_patience.h"
#include "core/device/fake_runtime.h"

namespace thalweg::pinned_path_test {
namespace {

using ::testing::EndsWith;
using ::testing::IsEmpty;
using Call = FakeRuntime::Call;

constexpr uint64_t kChunk = 1 << 20;
constexpr uint64_t kElems = 10 * kChunk / 4;

// The fixture has a session's arenas, a bucket in device memory, and the stream that makes its
// gradients.
class PinnedPathTest : public ::testing::Test {
 protected:
  void Start(bool registers_read_only = true) {
    device_ = std::make_shared<FakeRuntime>(registers_read_only);
    ASSERT_TRUE(device_->BindThread().ok());
    path_ = *PinnedPath::Create(device_);
    producer_ = *device_->CreateStream();
    input_ = std::make_shared<BucketArena>(*BucketArena::Create("input", kElems * 4, true));
    auto result = BucketArena::Create("result", kElems * 4, true);
    result_ = std::make_shared<BucketArena>(*std::move(result));
    gradient_ = {device_->Allocate(kElems * 4), producer_, owner_};
  }
  void TearDown() override { EXPECT_THAT(device_->violations(), IsEmpty()); }

  DeviceStream out() { return device_->stream(0); }
  DeviceStream notify() { return device_->stream(1); }
  DeviceStream in() { return device_->stream(2); }

  void Make(float value) {
    device_->Run(producer_, [inside = device_->Inside(gradient_.bytes), value] {
      std::fill_n(reinterpret_cast<float*>(inside.data()), kElems, value);
    });
  }
  absl::Status Send() {
    input_->ResetReady();
    return path_->Send(lane_, gradient_, plan_);
  }
  void SetResult(float value) {
    std::fill_n(reinterpret_cast<float*>(result_->payload()), kElems, value);
  }
  uint32_t Ready() { return input_->WaitReady(0, Now()); }
  std::vector<float> Input() { return ToVector(std::as_const(*input_).payload()); }
  std::vector<float> InMemory() { return ToVector(device_->Inside(gradient_.bytes).data()); }
  // This replaces gmock's Each, which takes seconds for so many elements.
  static bool All(const std::vector<float>& values, float value) {
    return values == std::vector<float>(kElems, value);
  }
  static std::vector<float> ToVector(const std::byte* bytes) {
    std::vector<float> values(kElems);
    std::memcpy(values.data(), bytes, kElems * 4);
    return values;
  }

  std::shared_ptr<FakeRuntime> device_;
  std::unique_ptr<PinnedPath> path_;
  std::shared_ptr<PinnedPath::Lane> lane_;
  std::shared_ptr<BucketArena> input_;
  std::shared_ptr<BucketArena> result_;
  DeviceStream producer_ = nullptr;
  std::shared_ptr<int> owner_ = std::make_shared<int>();
  DeviceGradient gradient_;
  const ChunkPlan plan_ = ChunkPlan::For(kElems, DType::kFloat32, WireFormat::kFloat32, kChunk, 1);
};

TEST_F(PinnedPathTest, GradientIsCopiedWhenItsProducerHasMadeIt) {
  Start();
  lane_ = *path_->OpenLane(input_, kElems * 4);
  device_->Hold(producer_);
  Make(3);
  ASSERT_TRUE(Send().ok());
  device_->Settle();
  EXPECT_EQ(Ready(), 0u);
  device_->Release(producer_);
  device_->Settle();
  EXPECT_EQ(Ready(), plan_.Count());
  EXPECT_TRUE(All(Input(), 3));
  EXPECT_EQ(device_->copied_bytes(Call::kCopyToHost), kElems * 4);
  EXPECT_EQ(device_->pageable_copies(), 0u);
}

TEST_F(PinnedPathTest, CopiesDoNotWaitForTheHostToHearOfThem) {
  Start();
  lane_ = *path_->OpenLane(input_, kElems * 4);
  device_->Hold(notify());
  ASSERT_TRUE(Send().ok());
  device_->Settle();
  EXPECT_EQ(device_->copied_bytes(Call::kCopyToHost), kElems * 4);
  EXPECT_EQ(Ready(), 0u);
  device_->Release(notify());
  device_->Settle();
  EXPECT_EQ(Ready(), plan_.Count());
}

TEST_F(PinnedPathTest, ConsumersThatWaitForTheEventSeeTheResult) {
  Start();
  lane_ = *path_->OpenLane(input_, kElems * 4);
  SetResult(5);
  const DeviceStream consumer = *device_->CreateStream();
  device_->Hold(in());
  const auto arrived = path_->Fetch(lane_, result_, gradient_);
  ASSERT_TRUE(arrived.ok());
  ASSERT_TRUE(device_->Wait(consumer, *arrived).ok());
  std::vector<float> seen;
  device_->Run(consumer, [this, &seen] { seen = InMemory(); });
  device_->Settle();
  EXPECT_THAT(seen, IsEmpty());
  device_->Release(in());
  device_->Settle();
  EXPECT_TRUE(All(seen, 5));
}

TEST_F(PinnedPathTest, ResultInAnotherArenaIsFetchedFromThere) {
  Start();
  lane_ = *path_->OpenLane(input_, kElems * 4);
  SetResult(5);
  ASSERT_TRUE(path_->Fetch(lane_, result_, gradient_).ok());
  auto next = BucketArena::Create("result", kElems * 4, true);
  ASSERT_TRUE(next.ok()) << next.status();
  result_ = std::make_shared<BucketArena>(*std::move(next));  // of the sidecar's next process
  SetResult(6);
  ASSERT_TRUE(path_->Fetch(lane_, result_, gradient_).ok());
  device_->Settle();
  EXPECT_TRUE(All(InMemory(), 6));
  EXPECT_EQ(device_->pageable_copies(), 0u);
}

// Otherwise the sidecar would overwrite the result arena before the copy has read it.
TEST_F(PinnedPathTest, NextGradientIsNotHandedOverBeforeTheLastResultHasBeenRead) {
  Start();
  lane_ = *path_->OpenLane(input_, kElems * 4);
  ASSERT_TRUE(Send().ok());
  device_->Settle();
  device_->Hold(in());
  ASSERT_TRUE(path_->Fetch(lane_, result_, gradient_).ok());
  ASSERT_TRUE(Send().ok());
  device_->Settle();
  EXPECT_EQ(Ready(), 0u);
  device_->Release(in());
  device_->Settle();
  EXPECT_EQ(Ready(), plan_.Count());
}

TEST_F(PinnedPathTest, ResultsThatCannotBeRegisteredAreCopiedAllTheSame) {
  Start(false);
  lane_ = *path_->OpenLane(input_, kElems * 4);
  EXPECT_EQ(path_->path(), GradientPath::kPageable);
  SetResult(7);
  ASSERT_TRUE(path_->Fetch(lane_, result_, gradient_).ok());
  device_->Settle();
  EXPECT_TRUE(All(InMemory(), 7));
  EXPECT_EQ(device_->pageable_copies(), 1u);
}

TEST_F(PinnedPathTest, NothingIsFreedBeforeTheLastCopyAndAllIsAfterwards) {
  Start();
  lane_ = *path_->OpenLane(input_, kElems * 4);
  const std::weak_ptr<int> owner = owner_;
  const std::weak_ptr<BucketArena> input = input_;
  device_->Hold(producer_);
  Make(1);
  ASSERT_TRUE(Send().ok());
  lane_.reset();
  input_.reset();
  owner_.reset();
  gradient_.owner.reset();
  device_->Settle();
  EXPECT_FALSE(owner.expired());
  EXPECT_FALSE(input.expired());
  EXPECT_EQ(device_->registered_ranges(), 1u);
  device_->Release(producer_);
  EXPECT_TRUE(path_->Close(Now() + kTestPatience));
  EXPECT_TRUE(owner.expired());
  EXPECT_TRUE(input.expired());
  EXPECT_EQ(device_->registered_ranges(), 0u);
}

TEST_F(PinnedPathTest, CloseLeavesBehindWhatAStalledStreamWillStillUse) {
  Start();
  lane_ = *path_->OpenLane(input_, kElems * 4);
  device_->Hold(out());
  device_->Hold(in());
  ASSERT_TRUE(Send().ok());
  ASSERT_TRUE(path_->Fetch(lane_, result_, gradient_).ok());
  EXPECT_FALSE(path_->Close(Now() + std::chrono::milliseconds(1)));
  path_.reset();
  lane_.reset();
  EXPECT_EQ(device_->registered_ranges(), 2u);
  const DeviceStream streams[] = {device_->stream(0), device_->stream(2)};
  for (const DeviceStream stream : streams) {
    device_->Release(stream);
    device_->Settle();  // TearDown checks for violations
  }
  EXPECT_EQ(device_->copied_bytes(Call::kCopyToHost), kElems * 4);
  EXPECT_EQ(device_->copied_bytes(Call::kCopyToDevice), kElems * 4);
}

TEST_F(PinnedPathTest, ClosedPathTakesNothingMore) {
  Start();
  lane_ = *path_->OpenLane(input_, kElems * 4);
  EXPECT_TRUE(path_->Close(Now() + kTestPatience));
  EXPECT_TRUE(absl::IsCancelled(Send()));
  EXPECT_TRUE(absl::IsCancelled(path_->Fetch(lane_, result_, gradient_).status()));
}

TEST_F(PinnedPathTest, WhoeverDestroysAClosedPathNeedsNoDevice) {
  Start();
  EXPECT_TRUE(path_->Close(Now() + kTestPatience));
  FakeRuntime elsewhere;
  ASSERT_TRUE(elsewhere.BindThread().ok());
  EXPECT_TRUE(path_->Close(Now()));
  path_.reset();  // TearDown checks for violations
}

TEST_F(PinnedPathTest, PathThatCouldNotBeClosedStaysSo) {
  Start();
  lane_ = *path_->OpenLane(input_, kElems * 4);
  device_->Hold(out());
  ASSERT_TRUE(Send().ok());
  EXPECT_FALSE(path_->Close(Now()));
  device_->Release(out());
  device_->Settle();
  EXPECT_FALSE(path_->Close(Now() + kTestPatience));
}

TEST_F(PinnedPathTest, LostDeviceIsReportedAndNotWaitedFor) {
  Start();
  lane_ = *path_->OpenLane(input_, kElems * 4);
  device_->Hold(out());
  ASSERT_TRUE(Send().ok());
  device_->FailDevice(absl::InternalError("lost"));
  EXPECT_EQ(path_->Check().message(), "lost");
  EXPECT_FALSE(path_->Close(kUntilStopped));
}

TEST_F(PinnedPathTest, OnlyWhatHasBeenCopiedIsSaidToBeReady) {
  Start();
  lane_ = *path_->OpenLane(input_, kElems * 4);
  device_->FailAt(Call::kCopyToHost, 2, absl::InternalError("injected"));
  EXPECT_FALSE(Send().ok());
  device_->Settle();
  EXPECT_GT(Ready(), 0u);
  EXPECT_LT(Ready(), plan_.Count());
  EXPECT_EQ(device_->copied_bytes(Call::kCopyToHost), plan_.Begin(Ready()) * 4);
}

TEST_F(PinnedPathTest, HalfQueuedCopyIsNotWaitedFor) {
  Start();
  lane_ = *path_->OpenLane(input_, kElems * 4);
  device_->FailAt(Call::kLaunch, 1, absl::InternalError("injected"));
  EXPECT_FALSE(Send().ok());
  EXPECT_FALSE(path_->Close(kUntilStopped));
}

TEST_F(PinnedPathTest, EmptyBucketNeedsNoCopies) {
  Start();
  auto empty = std::make_shared<BucketArena>(*BucketArena::Create("empty", 0, true));
  const auto lane = *path_->OpenLane(empty, 0);
  const DeviceGradient gradient{{}, producer_, owner_};
  const auto plan = ChunkPlan::For(0, DType::kFloat32, WireFormat::kFloat32, kChunk, 1);
  EXPECT_TRUE(path_->Send(lane, gradient, plan).ok());
  EXPECT_TRUE(path_->Fetch(lane, empty, gradient).ok());
  EXPECT_TRUE(path_->Close(Now() + kTestPatience));
}

class PinnedPathErrorTest : public PinnedPathTest, public ::testing::WithParamInterface<Call> {};

// Each call of its kind fails in turn, until there are no more.
TEST_P(PinnedPathErrorTest, AnyCallThatFailsIsReportedAndFreesNothingInUse) {
  for (uint32_t nth = 1;; ++nth) {
    Start();
    SCOPED_TRACE(nth);
    device_->FailAt(GetParam(), nth, absl::InternalError("injected"));
    device_->Hold(out());
    absl::Status status;
    auto lane = path_->OpenLane(input_, kElems * 4);
    status = lane.status();
    if (status.ok()) lane_ = *std::move(lane);
    if (status.ok()) status = Send();
    if (status.ok()) status = path_->Fetch(lane_, result_, gradient_).status();
    if (!status.ok()) {
      EXPECT_THAT(std::string(status.message()), EndsWith("injected"));
      path_->Close(Now());
      lane_.reset();
    }
    device_->Settle();  // a session's copies never overlap: the result follows the gradient
    device_->Release(out());
    path_.reset();
    lane_.reset();
    device_->Settle();
    EXPECT_THAT(device_->violations(), IsEmpty());
    if (status.ok()) break;
    ASSERT_LT(nth, 100u);
  }
}

INSTANTIATE_TEST_SUITE_P(Calls, PinnedPathErrorTest,
                         ::testing::Values(Call::kCreateEvent, Call::kRecord, Call::kWait,
                                           Call::kCopyToHost, Call::kCopyToDevice, Call::kLaunch,
                                           Call::kRegisterHost));

}  // namespace
}  // namespace thalweg::pinned_path_test
