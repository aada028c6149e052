#include "server/sidecar/cuda/cuda_memory.h"

#include <gmock/gmock.h>

#include "core/base/codec_policy.h"
#include "core/base/protocol.h"
#include "server/sidecar/bucket/make_codecs.h"
#include "server/sidecar/cuda/node_rounds.h"

namespace thalweg::cuda_memory_test {
namespace {

using ::testing::HasSubstr;

const BucketLayout kLayout{DType::kFloat32, {{"a", {1500}}, {"b", {3, 700}}, {"c", {1}}}};

class CudaMemoryTest : public ::testing::Test {
 protected:
  std::unique_ptr<DenseCodec> Codec(BucketMemory& memory) {
    return MakeDenseCodec(kLayout, memory, {{3}, kMinChunkBytes, 1}, {policy_});
  }
  static std::vector<Floats> Gradients(size_t workers) {
    return std::vector<Floats>(workers, RandomFloats(1, kLayout.Elems()));
  }

  // Returns the memory of a bucket whose round waits for the share of `worker`. Its stream is held.
  std::unique_ptr<BucketMemory> AwaitShare(FakeGpuWorker& worker, Duration patience) {
    auto memory = *device_.MakeMemory({{3}, kLayout, DType::kFloat32, 1, patience});
    EXPECT_TRUE(memory->AddInput(0, UniqueFd(), worker.Share()).ok());
    gpus_[0].Hold(worker.stream());
    worker.Make(RandomFloats(1, kLayout.Elems()));
    EXPECT_TRUE(memory->BeginRound().ok());
    return memory;
  }

  const CodecPolicy policy_ = *CodecPolicy::Parse("fp16");
  FakeGpus gpus_{2};
  CudaDevice device_{{gpus_.All()[0]}, nullptr};
};

TEST_F(CudaMemoryTest, MemoryOfAGpuThatTheSidecarDoesNotSeeIsRefused) {
  auto memory = *device_.MakeMemory({{3}, kLayout, DType::kFloat32, 1, kPatience});
  FakeGpuWorker worker(gpus_[1], 64);
  const absl::Status status = memory->AddInput(0, UniqueFd(), worker.Share());
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound) << status;
}

TEST_F(CudaMemoryTest, GpuThatFailsEndsTheWaitWithItsErrorAndKeepsItsMemory) {
  {
    GpuNode gpu(gpus_, device_, kLayout, 1);
    const auto codec = Codec(gpu.memory());
    FoldPool pool(1);
    MemoryGradient gradient(gpu.memory());
    gpus_[0].Hold(static_cast<CudaMemory&>(gpu.memory()).home().stream());
    gpu.Make(Gradients(1));
    ASSERT_TRUE(gpu.memory().BeginRound().ok());
    ASSERT_TRUE(codec->Begin(pool, gradient).ok());
    gpus_.Settle();
    gpus_[0].FailDevice(absl::InternalError("the GPU has fallen off the bus"));
    codec->part().BeginRound();
    EXPECT_EQ(codec->Encode(codec->part(), 0, gradient).status().message(),
              "the GPU has fallen off the bus");
  }
  // Memory that the GPU may still use was not freed.
  EXPECT_GT(gpus_[0].allocated(), 0u);
}

TEST_F(CudaMemoryTest, WhoWaitsForAShareFindsTheErrorOfItsGpu) {
  FakeGpuWorker worker(gpus_[0], kLayout.Elems() * sizeof(float));
  auto memory = AwaitShare(worker, Duration::zero());
  EXPECT_TRUE(memory->Check().ok());
  gpus_[0].FailDevice(absl::InternalError("the GPU has fallen off the bus"));
  EXPECT_EQ(memory->WaitInput(0, 1, Now()), 0u);
  EXPECT_EQ(memory->Check().message(), "the GPU has fallen off the bus");
}

TEST_F(CudaMemoryTest, GpuIsBlockedFromTheFirstWaitThatEndsInVainUntilItIsIdle) {
  FakeGpuWorker killed(gpus_[0], kLayout.Elems() * sizeof(float));
  auto stuck = AwaitShare(killed, Duration::zero());
  stuck->DropInput(0);
  EXPECT_TRUE(GpuLane::IsBlocked(gpus_[0]));
  // Another lane is not waited for, however long it may be.
  const auto lane = *GpuLane::Create(gpus_.All()[0], kPatience);
  gpus_[0].Hold(lane->stream());
  EXPECT_EQ(lane->WaitUntilIdle().code(), absl::StatusCode::kUnavailable);
  gpus_[0].Release(lane->stream());
  gpus_[0].Release(killed.stream());
  gpus_.Settle();
  EXPECT_FALSE(GpuLane::IsBlocked(gpus_[0]));
  EXPECT_TRUE(lane->WaitUntilIdle().ok());
}

TEST_F(CudaMemoryTest, NothingIsLeftWhenABucketIsGone) {
  {
    GpuNode gpu(gpus_, device_, kLayout, 2);
    const auto codec = Codec(gpu.memory());
    gpu.Make(Gradients(2));
    ASSERT_TRUE(RunRound(*codec, gpu.memory()).ok());
  }
  EXPECT_EQ(gpus_[0].allocated(), 0u);
  EXPECT_EQ(gpus_[0].opened(), 0u);
  EXPECT_EQ(gpus_[0].registered_ranges(), 0u);
}

TEST_F(CudaMemoryTest, GpuThatFailsAfterItWasIdleKeepsItsMemory) {
  {
    GpuNode gpu(gpus_, device_, kLayout, 2);
    const auto codec = Codec(gpu.memory());
    gpu.Make(Gradients(2));
    ASSERT_TRUE(RunRound(*codec, gpu.memory()).ok());
    gpu.memory().DropInput(0);
    EXPECT_EQ(gpus_[0].opened(), 1u);
    gpus_[0].FailDevice(absl::InternalError("lost"));
  }
  EXPECT_GT(gpus_[0].allocated(), 0u);
}

TEST_F(CudaMemoryTest, ShareIsClosedOnceAndItsRoundCanStillBeAskedFor) {
  GpuNode gpu(gpus_, device_, kLayout, 2);
  const auto codec = Codec(gpu.memory());
  gpu.Make(Gradients(2));
  ASSERT_TRUE(RunRound(*codec, gpu.memory()).ok());
  for (int i = 0; i < 2; ++i) gpu.memory().DropInput(0);
  EXPECT_EQ(gpus_[0].opened(), 1u);
  // The watchdog may ask who has filled the round while a worker leaves.
  EXPECT_EQ(gpu.memory().WaitInput(0, 1, Now()), 1u);
  EXPECT_TRUE(gpu.memory().HasInput(0));
}

TEST_F(CudaMemoryTest, WhatWasLeftBehindIsFreedWhenTheGpuHasDoneItsWork) {
  FakeGpuWorker worker(gpus_[0], kLayout.Elems() * sizeof(float));
  auto memory = AwaitShare(worker, std::chrono::milliseconds(20));
  memory->DropInput(0);  // without success
  memory.reset();
  EXPECT_EQ(gpus_[0].opened(), 1u);
  gpus_[0].Release(worker.stream());
  gpus_.Settle();
  memory = *device_.MakeMemory({{4}, kLayout, DType::kFloat32, 1, kPatience});
  FakeGpuWorker other(gpus_[0], kLayout.Elems() * sizeof(float));
  ASSERT_TRUE(memory->AddInput(0, UniqueFd(), other.Share()).ok());
  EXPECT_EQ(gpus_[0].opened(), 1u);  // the other worker's
}

TEST_F(CudaMemoryTest, NothingIsFreedBehindWorkThatDoesNotEnd) {
  FakeGpuWorker killed(gpus_[0], kLayout.Elems() * sizeof(float));
  auto stuck = AwaitShare(killed, std::chrono::milliseconds(20));
  size_t allocated = 0;
  {
    GpuNode healthy(gpus_, device_, kLayout, 2);
    stuck.reset();
    EXPECT_TRUE(GpuLane::IsBlocked(gpus_[0]));
    const auto codec = Codec(healthy.memory());
    healthy.Make(Gradients(2));
    EXPECT_TRUE(RunRound(*codec, healthy.memory()).ok());  // it goes on
    healthy.memory().DropInput(1);
    allocated = gpus_[0].allocated();
  }
  EXPECT_EQ(gpus_[0].allocated(), allocated);
  gpus_[0].Release(killed.stream());
  gpus_.Settle();
  EXPECT_TRUE(GpuLane::Create(gpus_.All()[0], kPatience).ok());
  EXPECT_FALSE(GpuLane::IsBlocked(gpus_[0]));
  EXPECT_EQ(gpus_[0].allocated(), 1u);  // the killed worker's
}

class ProbeTest : public CudaMemoryTest {
 protected:
  // Returns a worker's memory with that content.
  DeviceMemory Probe(size_t gpu, const char* content) {
    workers_.push_back(std::make_unique<FakeGpuWorker>(gpus_[gpu], sizeof(kDeviceProbe)));
    workers_.back()->Make(std::vector<char>(content, content + sizeof(kDeviceProbe)));
    return workers_.back()->Share();
  }

  std::vector<std::unique_ptr<FakeGpuWorker>> workers_;
};

TEST_F(ProbeTest, MemoryThatCanBeReadPasses) {
  EXPECT_TRUE(device_.Probe(Probe(0, kDeviceProbe)).ok());
  EXPECT_EQ(gpus_[0].opened(), 0u);
}

TEST_F(ProbeTest, MemoryWithAnotherContentDoesNot) {
  EXPECT_EQ(device_.Probe(Probe(0, std::string(sizeof(kDeviceProbe), 'x').data())).code(),
            absl::StatusCode::kDataLoss);
}

TEST_F(ProbeTest, GpuThatTheSidecarDoesNotSeeDoesNot) {
  const absl::Status status = device_.Probe(Probe(1, kDeviceProbe));
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), HasSubstr("NVIDIA_VISIBLE_DEVICES"));
}

TEST_F(ProbeTest, GpuOnWhichAnEarlierJobIsStuckDoesNot) {
  FakeGpuWorker killed(gpus_[0], kLayout.Elems() * sizeof(float));
  auto stuck = AwaitShare(killed, Duration::zero());
  stuck.reset();
  const absl::Status refused = device_.Probe(Probe(0, kDeviceProbe));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("restart the sidecar"));
  gpus_[0].Release(killed.stream());
  gpus_.Settle();
  EXPECT_TRUE(device_.Probe(Probe(0, kDeviceProbe)).ok());
}

TEST_F(ProbeTest, SystemThatCannotOpenMemoryDoesNot) {
  const DeviceMemory probe = Probe(0, kDeviceProbe);
  gpus_[0].FailAt(FakeRuntime::Call::kOpen, 1, absl::UnimplementedError("no IPC here"));
  EXPECT_EQ(device_.Probe(probe).message(), "no IPC here");
}

}  // namespace
}  // namespace thalweg::cuda_memory_test
