// These tests run the path on a real GPU: the bytes are right although all work on the device is
// late.
#include <fcntl.h>
#include <gmock/gmock.h>

#include <memory>
#include <utility>
#include <vector>

#include "client/core/pinned_path.h"
#include "core/base/testing/test_patience.h"
#include "core/device/gpu_test.h"

namespace thalweg::pinned_path_gpu_test {
namespace {

// a bucket of DDP's size, and three elements
constexpr uint64_t kElems = 25 * (uint64_t{1} << 20) / 4 + 3;
constexpr uint64_t kBytes = kElems * 4;

class PinnedPathGpuTest : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    path_ = *PinnedPath::Create(device_);
    RecordProperty("path", Name(path_->path()));
    input_ = std::make_shared<BucketArena>(*BucketArena::Create("input", kBytes, true));
    result_ = std::make_unique<BucketArena>(*BucketArena::Create("result", kBytes, true));
    // A worker has the sidecar's memory mapped read-only, as here.
    UniqueFd fd(fcntl(result_->fd(), F_DUPFD_CLOEXEC, 0));
    read_ = std::make_shared<const BucketArena>(*BucketArena::Open(std::move(fd), kBytes));
    lane_ = *path_->OpenLane(input_, kElems * 4);
    producer_ = *device_->CreateStream();
    consumer_ = *device_->CreateStream();
    gradient_ = {{Allocate(kBytes), kBytes}, producer_, nullptr};
  }
  void TearDown() override {
    if (path_ != nullptr) {
      EXPECT_TRUE(path_->Close(Now() + kTestPatience));
      device_->DestroyStream(producer_);
      device_->DestroyStream(consumer_);
    }
    lane_.reset();
    GpuTest::TearDown();
  }

  // Sends a gradient of bytes `value` that the producer makes late.
  absl::Status Send(int value) {
    KeepBusy(producer_);
    Fill(gradient_.bytes.data(), value, kBytes, producer_);
    input_->ResetReady();
    return path_->Send(lane_, gradient_, plan_);
  }
  bool InputIs(int value) const {
    if (input_->WaitReady(plan_.Count(), Now() + kTestPatience) != plan_.Count()) return false;
    return All(std::as_const(*input_).payload(), value);
  }
  static bool All(const std::byte* bytes, int value) {
    return std::vector<std::byte>(kBytes, static_cast<std::byte>(value)) ==
           std::vector<std::byte>(bytes, bytes + kBytes);
  }

  std::unique_ptr<PinnedPath> path_;
  std::shared_ptr<BucketArena> input_;
  std::unique_ptr<BucketArena> result_;  // the sidecar's result
  std::shared_ptr<const BucketArena> read_;
  std::shared_ptr<PinnedPath::Lane> lane_;
  DeviceStream producer_ = nullptr;
  DeviceStream consumer_ = nullptr;
  DeviceGradient gradient_;
  const ChunkPlan plan_ =
      ChunkPlan::For(kElems, DType::kFloat32, WireFormat::kFloat32, uint64_t{1} << 20, 1);
};

TEST_F(PinnedPathGpuTest, EveryRoundsGradientAndResultArriveWhole) {
  std::byte* const seen = Allocate(kBytes);
  std::vector<std::byte> values(kBytes);
  for (int round = 1; round <= 5; ++round) {
    ASSERT_TRUE(Send(round).ok());
    ASSERT_TRUE(InputIs(round)) << "round " << round;
    std::fill_n(result_->payload(), kBytes, static_cast<std::byte>(100 + round));
    const auto arrived = path_->Fetch(lane_, read_, gradient_);
    ASSERT_TRUE(arrived.ok()) << arrived.status();
    ASSERT_TRUE(device_->Wait(consumer_, *arrived).ok());
    ASSERT_EQ(cudaMemcpyAsync(seen, gradient_.bytes.data(), kBytes, cudaMemcpyDeviceToDevice,
                              reinterpret_cast<cudaStream_t>(consumer_)),
              cudaSuccess);
    // The next gradient overwrites the result after its use, as backward does.
    const DeviceEvent used = *device_->CreateEvent();
    ASSERT_TRUE(device_->Record(used, consumer_).ok());
    ASSERT_TRUE(device_->Wait(producer_, used).ok());
    device_->DestroyEvent(used);
    ASSERT_TRUE(device_->CopyToHost(values.data(), seen, kBytes, consumer_).ok());
    Synchronize(consumer_);
    ASSERT_TRUE(All(values.data(), 100 + round)) << "round " << round;
  }
}

TEST_F(PinnedPathGpuTest, ClosingWaitsForWhatIsQueuedAndFreesIt) {
  const auto owner = std::make_shared<int>();
  gradient_.owner = owner;
  ASSERT_TRUE(Send(9).ok());
  gradient_.owner.reset();
  EXPECT_EQ(owner.use_count(), 2);  // KeepBusy ensures that the copy is not done yet
  EXPECT_TRUE(path_->Close(Now() + kTestPatience));
  EXPECT_EQ(owner.use_count(), 1);
  EXPECT_TRUE(InputIs(9));
}

}  // namespace
}  // namespace thalweg::pinned_path_gpu_test
