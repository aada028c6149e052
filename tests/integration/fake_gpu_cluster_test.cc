// These tests send gradients that stay on GPUs through worker, sidecar, shard and back; the GPUs
// are fake, and their kernels run on the emulator.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>

#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "server/sidecar/cuda/fake_gpus.h"
#include "tests/integration/device_worker.h"
#include "tests/integration/made_gradient.h"

namespace thalweg::fake_gpu_cluster_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using Call = FakeRuntime::Call;

constexpr size_t kElems = 5000;  // several chunks
const BucketLayout kLayout{DType::kFloat32, {{"w", {40, 100}}, {"b", {1000}}}};

std::vector<float> Gradient(uint32_t rank, uint64_t round) {
  return MadeGradient(rank, round, kElems);
}

// A GpuCluster has nodes with one GPU each, which their workers share.
class GpuCluster {
 public:
  GpuCluster(uint32_t nodes, uint32_t workers, bool sidecars_see_gpus = true)
      : gpus_(static_cast<int>(nodes)),
        devices_(nodes),
        cluster_(nodes, workers, 2, {}, 0, [&](uint32_t node) -> Device* {
          if (!sidecars_see_gpus) return nullptr;
          devices_[node] = std::make_unique<CudaDevice>(
              std::vector<std::shared_ptr<DeviceRuntime>>{gpus_.All()[node]}, nullptr);
          return devices_[node].get();
        }) {}
  ~GpuCluster() { workers_.clear(); }

  FakeRuntime& gpu(uint32_t node) { return gpus_[node]; }
  Cluster& cluster() { return cluster_; }
  DeviceWorker& worker(uint32_t rank) { return *workers_[rank]; }

  void Connect(const char* codec, Duration timeout = kTestPatience,
               const std::function<void()>& free_device_memory = nullptr) {
    std::vector<std::future<std::unique_ptr<DeviceWorker>>> pending;
    for (uint32_t rank = 0; rank < cluster_.world_size(); ++rank) {
      SessionOptions options = cluster_.OptionsFor(rank);
      options.codec = *CodecPolicy::Parse(codec);
      options.timeout = timeout;
      options.free_device_memory = free_device_memory;
      auto gpu = gpus_.Share(options.node);
      pending.push_back(std::async(std::launch::async, [options, gpu] {
        return std::make_unique<DeviceWorker>(options, gpu);
      }));
    }
    for (auto& worker : pending) workers_.push_back(worker.get());
    for (const auto& worker : workers_) {
      ASSERT_TRUE(worker->connected().ok()) << worker->connected();
      ASSERT_TRUE(worker->device().BindThread().ok());
      ASSERT_TRUE(worker->session().RegisterBucket({0, 0}, kLayout).ok());
    }
  }
  // Returns what each worker's stream sees after a round.
  std::vector<Outcome> Reduce(uint64_t round) {
    std::vector<std::future<Outcome>> pending;
    for (uint32_t rank = 0; rank < workers_.size(); ++rank) {
      pending.push_back(workers_[rank]->Reduce(Gradient(rank, round)));
    }
    std::vector<Outcome> outcomes;
    for (auto& outcome : pending) outcomes.push_back(Get(outcome));
    return outcomes;
  }

 private:
  FakeGpus gpus_;
  std::vector<std::unique_ptr<CudaDevice>> devices_;
  Cluster cluster_;
  std::vector<std::unique_ptr<DeviceWorker>> workers_;
};

// Runs the same job with gradients in host memory.
std::vector<std::byte> OnCpu(uint32_t nodes, uint32_t workers, const char* codec, uint64_t rounds) {
  Cluster cluster(nodes, workers, 2);
  const auto sessions = cluster.ConnectAll(
      [&](SessionOptions& options) { options.codec = *CodecPolicy::Parse(codec); });
  std::vector<std::byte> last;
  for (const auto& session : sessions) {
    EXPECT_TRUE((*session)->RegisterBucket({0, 0}, kLayout).ok());
  }
  for (uint64_t round = 1; round <= rounds; ++round) {
    std::vector<std::vector<float>> gradients;
    std::vector<std::future<Outcome>> pending;
    for (uint32_t rank = 0; rank < sessions.size(); ++rank) {
      gradients.push_back(Gradient(rank, round));
      pending.push_back(
          SubmitAsync(**sessions[rank], {0, 0}, std::as_bytes(std::span(gradients.back()))));
    }
    for (auto& outcome : pending) last = *Get(outcome);
  }
  return last;
}

struct Shape {
  uint32_t nodes, workers;
  const char* codec;
};

class GpuClusterTest : public ::testing::TestWithParam<Shape> {};

TEST_P(GpuClusterTest, EveryWorkerGetsTheBitsOfAClusterWithoutGpus) {
  const auto [nodes, workers, codec] = GetParam();
  constexpr uint64_t kRounds = 4;
  GpuCluster gpus(nodes, workers);
  gpus.Connect(codec);
  std::vector<Outcome> outcomes;
  for (uint64_t round = 1; round <= kRounds; ++round) outcomes = gpus.Reduce(round);
  const std::vector<std::byte> expected = OnCpu(nodes, workers, codec, kRounds);
  for (uint32_t rank = 0; rank < outcomes.size(); ++rank) {
    ASSERT_TRUE(outcomes[rank].ok()) << outcomes[rank].status();
    EXPECT_EQ(*outcomes[rank], expected) << "rank " << rank;
    EXPECT_EQ(gpus.worker(rank).session().stats().path, GradientPath::kIpc);
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, GpuClusterTest,
                         ::testing::Values(Shape{1, 2, "fp32"}, Shape{1, 1, "fp16"},
                                           Shape{2, 1, "fp32"}, Shape{2, 2, "fp16"},
                                           Shape{2, 2, "int8:start=2"},
                                           Shape{3, 1, "onebit:start=1"},
                                           Shape{2, 2, "topk:ratio=0.1,start=2"}));

TEST(GpuPathTest, SidecarWithoutAGpuGetsGradientsThroughHostMemory) {
  GpuCluster gpus(1, 2, /*sidecars_see_gpus=*/false);
  gpus.Connect("fp32");
  EXPECT_TRUE(gpus.Reduce(1)[0].ok());
  EXPECT_EQ(gpus.worker(0).session().stats().path, GradientPath::kPinned);
}

TEST(GpuPathTest, OneWorkerWhoseMemoryCannotBeOpenedTakesItsNodeToHostMemory) {
  GpuCluster gpus(2, 2);
  gpus.gpu(1).FailAt(Call::kOpen, 2, absl::UnimplementedError("no IPC here"));
  gpus.Connect("fp32");
  for (const Outcome& outcome : gpus.Reduce(1)) {
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    EXPECT_EQ(*outcome, OnCpu(2, 2, "fp32", 1));
  }
  EXPECT_EQ(gpus.worker(0).session().stats().path, GradientPath::kIpc);
  EXPECT_EQ(gpus.worker(2).session().stats().path, GradientPath::kPinned);
  EXPECT_EQ(gpus.worker(3).session().stats().path, GradientPath::kPinned);
  for (const char* path : {"ipc", "pinned"}) {
    Gauge& workers =
        gpus.cluster().registry().GetGauge("thalweg_sidecar_workers", "", {{"path", path}});
    EXPECT_EQ(workers.Value(), 2) << path;
  }
}

// A CapturedLog captures what servers log while it lives, in tests without servers at its begin and
// end.
class CapturedLog {
 public:
  CapturedLog() {
    spdlog::set_default_logger(std::make_shared<spdlog::logger>(
        "captured", std::make_shared<spdlog::sinks::ostream_sink_mt>(text_)));
  }
  ~CapturedLog() { spdlog::set_default_logger(std::move(before_)); }
  std::string text() const { return text_.str(); }

 private:
  std::shared_ptr<spdlog::logger> before_ = spdlog::default_logger();
  std::ostringstream text_;
};

TEST(GpuPathTest, SidecarsLogSaysWhichPathWorkersTakeAndWhyNotTheFirst) {
  const auto log_of = [](bool sees_gpus, bool opens_memory) {
    CapturedLog log;
    {
      GpuCluster gpus(1, 2, sees_gpus);
      if (!opens_memory) gpus.gpu(0).FailAt(Call::kOpen, 1, absl::UnimplementedError("no IPC"));
      gpus.Connect("fp32");
    }
    return log.text();
  };
  const std::string ipc = log_of(true, true);
  EXPECT_THAT(ipc, AllOf(HasSubstr("rank 0: path ipc"), HasSubstr("rank 1: path ipc")));
  EXPECT_THAT(ipc, Not(HasSubstr("not ipc")));
  EXPECT_THAT(log_of(true, false),
              AllOf(HasSubstr("path pinned; not ipc, since no IPC"),
                    HasSubstr("path pinned; not ipc, since another worker's GPU cannot be")));
  const std::string none = log_of(false, true);
  EXPECT_THAT(none, AllOf(HasSubstr("rank 0: path pinned; not ipc, since this sidecar has no GPU"),
                          HasSubstr("rank 1: path pinned; not ipc, since this sidecar has no")));
}

// On a GPU PowerSGD's first factor is summed in another order, so its results differ from those of
// a cluster without GPUs; between the nodes of one job they must not.
TEST(GpuPathTest, NodesWithAndWithoutGpusAgreeOnEveryBit) {
  for (const char* codec : {"powersgd:rank=2,start=2,min_rate=1", "onebit:start=1"}) {
    GpuCluster gpus(2, 1);
    gpus.gpu(1).FailAt(Call::kOpen, 1, absl::UnimplementedError("no IPC here"));
    gpus.Connect(codec);
    for (uint64_t round = 1; round <= 5; ++round) {
      const std::vector<Outcome> outcomes = gpus.Reduce(round);
      ASSERT_TRUE(outcomes[0].ok()) << outcomes[0].status();
      ASSERT_TRUE(outcomes[0] == outcomes[1]) << codec << ", round " << round;
    }
    EXPECT_EQ(gpus.worker(0).session().stats().path, GradientPath::kIpc);
    EXPECT_EQ(gpus.worker(1).session().stats().path, GradientPath::kPinned);
  }
}

TEST(GpuPathTest, MemoryThatIsOnlyKeptIsFreedWhereThereIsNoRoomForABucket) {
  GpuCluster gpus(1, 1);
  int freed = 0;
  // Before that there are the worker's probe, and what the sidecar's kernel makes of it.
  gpus.gpu(0).FailAt(Call::kAllocate, 3, absl::ResourceExhaustedError("out of memory"));
  gpus.Connect("fp32", kTestPatience, [&freed] { ++freed; });
  EXPECT_TRUE(gpus.Reduce(1)[0].ok());
  EXPECT_EQ(freed, 1);
}

TEST(GpuPathTest, ResultThatAWorkerCannotOpenFailsTheJobWithTheReasonForAll) {
  GpuCluster gpus(2, 1);
  for (const uint32_t node : {0u, 1u}) gpus.gpu(node).AllowFreeingOpenMemory();
  // The first two are the sidecar's: the probe and the worker's share.
  gpus.gpu(1).FailAt(Call::kOpen, 3, absl::ResourceExhaustedError("no room to open it"));
  gpus.Connect("fp32");
  for (const Outcome& outcome : gpus.Reduce(1)) {
    EXPECT_THAT(std::string(outcome.status().message()), HasSubstr("no room to open it"));
  }
}

TEST(GpuPathTest, GradientThatIsNeverMadeFailsTheJobNamingTheWorker) {
  GpuCluster gpus(1, 2);
  // After a failure the sidecar does not wait until workers have closed its results.
  gpus.gpu(0).AllowFreeingOpenMemory();
  gpus.Connect("fp32", std::chrono::seconds(15));
  ASSERT_TRUE(gpus.Reduce(1)[0].ok());
  gpus.gpu(0).Hold(gpus.worker(1).stream());
  std::vector<std::future<Outcome>> pending;
  for (uint32_t rank : {0u, 1u}) pending.push_back(gpus.worker(rank).Reduce(Gradient(rank, 2)));
  for (auto& outcome : pending) {
    const Outcome result = Get(outcome);
    EXPECT_THAT(std::string(result.status().message()), HasSubstr("rank 1"));
  }
  gpus.gpu(0).Release(gpus.worker(1).stream());
}

TEST(GpuPathTest, ResultOfAnEarlierLayoutStaysWhileAWorkerHasItOpen) {
  GpuCluster gpus(1, 2);
  gpus.Connect("fp32");
  DeviceWorker& slow = gpus.worker(0);
  gpus.gpu(0).Hold(slow.in());  // its copy of the result does not begin
  std::vector<std::future<Outcome>> pending;
  for (uint32_t rank : {0u, 1u}) pending.push_back(gpus.worker(rank).Reduce(Gradient(rank, 1)));
  ASSERT_TRUE(Get(pending[1]).ok());
  while (slow.session().stats().rounds < 1) std::this_thread::yield();
  const BucketLayout other{DType::kFloat32, {{"b", {1000}}, {"w", {40, 100}}}};
  for (uint32_t rank : {0u, 1u}) ASSERT_TRUE(gpus.worker(rank).Recut(other).ok());
  gpus.gpu(0).Release(slow.in());
  EXPECT_EQ(*Get(pending[0]), OnCpu(1, 2, "fp32", 1));
  const size_t both = gpus.gpu(0).allocated();
  for (uint64_t round = 2; round <= 3; ++round) {
    for (const Outcome& outcome : gpus.Reduce(round)) {
      EXPECT_EQ(*outcome, OnCpu(1, 2, "fp32", round));
    }
  }
  EXPECT_LT(gpus.gpu(0).allocated(), both);
}

TEST(GpuPathTest, NothingIsLeftOnTheGpuAfterTheJob) {
  GpuCluster gpus(1, 2);
  gpus.Connect("int8:start=1");
  for (uint64_t round = 1; round <= 3; ++round) ASSERT_TRUE(gpus.Reduce(round)[0].ok());
  for (uint32_t rank : {0u, 1u}) gpus.worker(rank).session().Close();
  const TimePoint deadline = Now() + kTestPatience;
  // Only the gradients remain, one for each worker.
  while (gpus.gpu(0).allocated() > 2 && Now() < deadline) gpus.cluster().sidecar(0).Reap();
  EXPECT_EQ(gpus.gpu(0).allocated(), 2u);
  EXPECT_EQ(gpus.gpu(0).opened(), 0u);
}

}  // namespace
}  // namespace thalweg::fake_gpu_cluster_test
