// These tests send gradients in a fake device's memory through worker, sidecar, shard and back.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "tests/integration/device_worker.h"

namespace thalweg::device_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Call = FakeRuntime::Call;

constexpr size_t kElems = 5000;  // several chunks
const BucketLayout kLayout{DType::kFloat32, {{"w", {kElems}}}};

// Returns small integers times the number of workers: every mean is exact, in fp16 too.
std::vector<float> Gradient(uint32_t rank, uint64_t round, uint32_t world_size) {
  std::vector<float> values(kElems);
  for (size_t i = 0; i < kElems; ++i) {
    values[i] = static_cast<float>(world_size * ((i * (rank + 1) + round) % 97));
  }
  return values;
}

std::vector<float> MeanOf(uint64_t round, uint32_t world_size) {
  std::vector<double> sums(kElems);
  for (uint32_t rank = 0; rank < world_size; ++rank) {
    const auto gradient = Gradient(rank, round, world_size);
    for (size_t i = 0; i < kElems; ++i) sums[i] += gradient[i];
  }
  std::vector<float> means(kElems);
  for (size_t i = 0; i < kElems; ++i) means[i] = static_cast<float>(sums[i] / world_size);
  return means;
}

std::vector<float> Floats(const Outcome& outcome) {
  std::vector<float> values(outcome.ok() ? outcome->size() / 4 : 0);
  if (outcome.ok()) std::memcpy(values.data(), outcome->data(), outcome->size());
  return values;
}

void Register(const std::vector<std::unique_ptr<DeviceWorker>>& workers) {
  for (const auto& worker : workers) {
    ASSERT_TRUE(worker->connected().ok()) << worker->connected();
    ASSERT_TRUE(worker->device().BindThread().ok());
    ASSERT_TRUE(worker->session().RegisterBucket({0, 0}, kLayout).ok());
  }
}

std::vector<std::future<Outcome>> ReduceAll(
    const std::vector<std::unique_ptr<DeviceWorker>>& workers, uint64_t round) {
  std::vector<std::future<Outcome>> pending;
  const auto world_size = static_cast<uint32_t>(workers.size());
  for (uint32_t rank = 0; rank < world_size; ++rank) {
    pending.push_back(workers[rank]->Reduce(Gradient(rank, round, world_size)));
  }
  return pending;
}

void ExpectNoViolations(const std::vector<std::unique_ptr<DeviceWorker>>& workers) {
  for (const auto& worker : workers) EXPECT_THAT(worker->device().violations(), IsEmpty());
}

struct Shape {
  uint32_t nodes, workers;
  DType codec;
};

class DeviceTest : public ::testing::TestWithParam<Shape> {};

TEST_P(DeviceTest, EveryWorkerSeesTheMeanInItsOwnMemory) {
  const auto [nodes, workers_per_node, codec] = GetParam();
  Cluster cluster(nodes, workers_per_node, 2);
  const auto workers =
      ConnectDevices(cluster, [&](SessionOptions& o) { o.codec.fallback.wire = codec; });
  Register(workers);
  for (uint64_t round = 1; round <= 5; ++round) {
    auto pending = ReduceAll(workers, round);
    for (auto& outcome : pending) {
      const Outcome result = Get(outcome);
      ASSERT_TRUE(result.ok()) << result.status();
      ASSERT_EQ(Floats(result), MeanOf(round, cluster.world_size())) << "round " << round;
    }
  }
  for (const auto& worker : workers) {
    EXPECT_EQ(worker->session().stats().path, GradientPath::kPinned);
    // The gradient is copied once each way, and nothing goes through pageable memory.
    EXPECT_EQ(worker->device().copied_bytes(Call::kCopyToHost), 5 * kElems * 4);
    EXPECT_EQ(worker->device().copied_bytes(Call::kCopyToDevice),
              5 * kElems * 4 + sizeof(kDeviceProbe));
    EXPECT_EQ(worker->device().pageable_copies(), 0u);
    worker->session().Close();
    EXPECT_EQ(worker->device().registered_ranges(), 0u);
  }
  ExpectNoViolations(workers);
}

INSTANTIATE_TEST_SUITE_P(Shapes, DeviceTest,
                         ::testing::Values(Shape{1, 1, DType::kFloat32},
                                           Shape{1, 2, DType::kFloat16},
                                           Shape{2, 1, DType::kFloat32},
                                           Shape{2, 1, DType::kFloat16},
                                           Shape{2, 2, DType::kFloat16}));

TEST(DevicePathTest, WorkersWithAndWithoutADeviceShareANode) {
  Cluster cluster(1, 2, 1);
  auto on_cpu =
      std::async(std::launch::async, [&] { return *Session::Connect(cluster.OptionsFor(0)); });
  DeviceWorker worker(cluster.OptionsFor(1), std::make_shared<FakeRuntime>());
  const auto session = on_cpu.get();
  ASSERT_TRUE(session->RegisterBucket({0, 0}, kLayout).ok());
  ASSERT_TRUE(worker.session().RegisterBucket({0, 0}, kLayout).ok());
  const std::vector<float> gradient = Gradient(0, 1, 2);
  auto first = SubmitAsync(*session, {0, 0}, std::as_bytes(std::span(gradient)));
  auto second = worker.Reduce(Gradient(1, 1, 2));
  EXPECT_EQ(Floats(Get(first)), MeanOf(1, 2));
  EXPECT_EQ(Floats(Get(second)), MeanOf(1, 2));
  EXPECT_EQ(session->stats().path, GradientPath::kCpu);
}

TEST(DevicePathTest, MetricSaysHowManyWorkersTakeWhichPath) {
  Cluster cluster(1, 3, 1);
  const auto workers = [&](const char* path) {
    return cluster.registry().GetGauge("thalweg_sidecar_workers", "", {{"path", path}}).Value();
  };
  auto on_cpu =
      std::async(std::launch::async, [&] { return *Session::Connect(cluster.OptionsFor(0)); });
  auto pageable = std::async(std::launch::async, [&] {
    return std::make_unique<DeviceWorker>(cluster.OptionsFor(1),
                                          std::make_shared<FakeRuntime>(false));
  });
  auto pinned =
      std::make_unique<DeviceWorker>(cluster.OptionsFor(2), std::make_shared<FakeRuntime>());
  const auto session = on_cpu.get();
  const auto other = pageable.get();
  EXPECT_EQ(workers("cpu"), 1);
  EXPECT_EQ(workers("pageable"), 1);
  EXPECT_EQ(workers("pinned"), 1);
  pinned->session().Close();
  while (workers("pinned") != 0) std::this_thread::yield();
  EXPECT_EQ(workers("cpu"), 1);
  EXPECT_EQ(workers("pageable"), 1);
}

TEST(DevicePathTest, SlowCopyOfAResultHoldsUpTheNextRoundAndSpoilsNothing) {
  Cluster cluster(1, 2, 1);
  const auto workers = ConnectDevices(cluster);
  Register(workers);
  workers[0]->device().Hold(workers[0]->in());
  auto first = ReduceAll(workers, 1);
  EXPECT_EQ(Floats(Get(first[1])), MeanOf(1, 2));
  // Worker 0 has been told, but its stream waits for the copy; so does the next round's gradient.
  while (workers[0]->session().stats().rounds < 1) std::this_thread::yield();
  auto second = workers[1]->Reduce(Gradient(1, 2, 2));
  EXPECT_EQ(first[0].wait_for(std::chrono::seconds(0)), std::future_status::timeout);
  workers[0]->device().Release(workers[0]->in());
  EXPECT_EQ(Floats(Get(first[0])), MeanOf(1, 2));
  auto last = workers[0]->Reduce(Gradient(0, 2, 2));
  EXPECT_EQ(Floats(Get(last)), MeanOf(2, 2));
  EXPECT_EQ(Floats(Get(second)), MeanOf(2, 2));
  ExpectNoViolations(workers);
}

TEST(DevicePathTest, DeviceThatIsLostFailsEveryWorkerWithItsReason) {
  Cluster cluster(2, 2, 1);
  const auto workers = ConnectDevices(cluster);
  Register(workers);
  workers[3]->device().Hold(workers[3]->out());
  auto pending = ReduceAll(workers, 1);
  workers[3]->device().FailDevice(absl::InternalError("CUDA: cudaErrorIllegalAddress"));
  for (uint32_t rank = 0; rank < 4; ++rank) {
    const Outcome result = Get(pending[rank]);
    EXPECT_THAT(std::string(result.status().message()), HasSubstr("cudaErrorIllegalAddress"));
    EXPECT_THAT(std::string(result.status().message()), HasSubstr(rank == 3 ? "" : "rank 3"));
  }
}

TEST(DevicePathTest, AnyCallThatFailsFailsEveryWorkerAndHangsNobody) {
  for (const Call call : {Call::kRecord, Call::kWait, Call::kCopyToHost, Call::kCopyToDevice,
                          Call::kLaunch, Call::kRegisterHost}) {
    SCOPED_TRACE(static_cast<int>(call));
    Cluster cluster(1, 2, 1);
    const auto workers = ConnectDevices(cluster);
    Register(workers);
    // The first of the hook's calls fails; or the completion thread's, for calls that only it
    // makes.
    workers[1]->device().FailAt(call, 1, absl::InternalError("injected"));
    auto pending = ReduceAll(workers, 1);
    EXPECT_THAT(std::string(Get(pending[1]).status().message()), HasSubstr("injected"));
    Outcome other = Get(pending[0]);
    if (other.ok()) {  // the failure came too late for it
      auto next = workers[0]->Reduce(Gradient(0, 2, 2));
      other = Get(next);
    }
    EXPECT_THAT(std::string(other.status().message()),
                AllOf(HasSubstr("rank 1"), HasSubstr("injected")));
    for (const auto& worker : workers) worker->session().Close();
    ExpectNoViolations(workers);
  }
}

TEST(DevicePathTest, CloseWithAStalledCopyEndsAndFreesNothingInUse) {
  Cluster cluster(1, 1, 1);
  const auto workers =
      ConnectDevices(cluster, [](SessionOptions& o) { o.timeout = std::chrono::seconds(5); });
  Register(workers);
  DeviceWorker& worker = *workers[0];
  const DeviceStream out = worker.out();
  worker.device().Hold(out);
  auto pending = worker.Reduce(Gradient(0, 1, 1));
  worker.session().Close();
  EXPECT_FALSE(Get(pending).ok());
  EXPECT_EQ(worker.device().registered_ranges(), 1u);
  worker.device().Release(out);
  worker.device().Settle();
  EXPECT_EQ(worker.device().copied_bytes(Call::kCopyToHost), kElems * 4);
  ExpectNoViolations(workers);
}

TEST(DevicePathTest, GradientOfTheOtherMemoryIsRefused) {
  Cluster cluster(1, 1, 1);
  const auto workers = ConnectDevices(cluster);
  Register(workers);
  const std::vector<float> gradient(kElems);
  auto refused = SubmitAsync(workers[0]->session(), {0, 0}, std::as_bytes(std::span(gradient)));
  EXPECT_THAT(std::string(Get(refused).status().message()), HasSubstr("is in host memory"));
  auto pending = workers[0]->Reduce(Gradient(0, 1, 1));
  EXPECT_TRUE(Get(pending).ok());
}

TEST(DevicePathTest, NewLayoutReplacesABucketWhoseResultIsStillBeingCopied) {
  Cluster cluster(1, 1, 1);
  const auto workers = ConnectDevices(cluster);
  Register(workers);
  DeviceWorker& worker = *workers[0];
  worker.device().Hold(worker.in());
  auto pending = worker.Reduce(Gradient(0, 1, 1));
  while (worker.session().stats().rounds < 1) std::this_thread::yield();
  BucketLayout layout = kLayout;
  layout.tensors[0].name = "v";
  ASSERT_TRUE(worker.session().RegisterBucket({0, 1}, layout).ok());
  worker.device().Release(worker.in());
  EXPECT_EQ(Floats(Get(pending)), MeanOf(1, 1));
  ExpectNoViolations(workers);
}

}  // namespace
}  // namespace thalweg::device_test
