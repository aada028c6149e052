// These tests use the path of gradients that stay on a real GPU: the sidecar runs in this process,
// its workers in others, because CUDA's handles work only in other processes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <future>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/device/gpu_test.h"
#include "server/sidecar/cuda/cuda_device.h"
#include "tests/integration/cluster.h"
#include "tests/integration/gpu_worker.h"
#include "tests/integration/made_gradient.h"

namespace thalweg::gpu_path_gpu_test {
namespace {

constexpr int64_t kRows = 1000;
constexpr uint64_t kRounds = 4;
const BucketLayout kLayout{DType::kFloat32, {{"w", {kRows, kRows}}, {"b", {3}}}};

struct Shape {
  uint32_t nodes, workers;
  const char* codec;
};

// Told is a worker's report about itself.
struct Told {
  std::string path;
  std::string result;  // bytes
};

// Returns what a worker has written; empty when it failed.
std::string Output(const std::string& command) {
  std::FILE* const pipe = popen(command.c_str(), "r");
  std::string output;
  std::vector<char> buffer(1 << 20);
  for (size_t n = 0; (n = std::fread(buffer.data(), 1, buffer.size(), pipe)) > 0;) {
    output.append(buffer.data(), n);
  }
  return pclose(pipe) == 0 ? output : "";
}

// All nodes share the GPU.
std::vector<Told> OnGpu(Device* gpus, const Shape& shape) {
  Cluster cluster(shape.nodes, shape.workers, 2, {}, 0, [&](uint32_t) { return gpus; });
  const auto worker =
      std::filesystem::read_symlink("/proc/self/exe").parent_path() / "gpu_path_worker";
  std::vector<std::future<std::string>> pending;
  for (uint32_t rank = 0; rank < cluster.world_size(); ++rank) {
    const std::string command = absl::StrCat(
        worker.string(), " ", cluster.SocketPath(rank / shape.workers), " ", shape.nodes, " ",
        shape.workers, " ", rank, " ", shape.codec, " ", kRows, " ", kRounds);
    pending.push_back(std::async(std::launch::async, [command] { return Output(command); }));
  }
  std::vector<Told> all;
  for (auto& output : pending) {
    const std::string text = output.get();
    const size_t line = text.find('\n');
    all.push_back(line == std::string::npos ? Told{}
                                            : Told{text.substr(0, line), text.substr(line + 1)});
  }
  return all;
}

// Runs the same job with gradients in host memory.
std::string OnCpu(const Shape& shape) {
  Cluster cluster(shape.nodes, shape.workers, 2);
  const auto sessions = cluster.ConnectAll([&](SessionOptions& options) {
    options.codec = *CodecPolicy::Parse(shape.codec);
    options.chunk_bytes = GpuWorker::kChunkBytes;
  });
  std::vector<std::byte> last;
  for (const auto& session : sessions) {
    EXPECT_TRUE((*session)->RegisterBucket({0, 0}, kLayout).ok());
  }
  for (uint64_t round = 1; round <= kRounds; ++round) {
    std::vector<std::vector<float>> gradients;
    std::vector<std::future<Outcome>> pending;
    for (uint32_t rank = 0; rank < sessions.size(); ++rank) {
      gradients.push_back(MadeGradient(rank, round, kLayout.Elems()));
      pending.push_back(
          SubmitAsync(**sessions[rank], {0, 0}, std::as_bytes(std::span(gradients.back()))));
    }
    for (auto& outcome : pending) last = *Get(outcome);
  }
  return {reinterpret_cast<const char*>(last.data()), last.size()};
}

class GpuPathGpuTest : public GpuTest {};

TEST_F(GpuPathGpuTest, WorkersThatShareAGpuGetTheBitsOfACpu) {
  CudaDevice gpus({device_}, nullptr);
  for (const Shape& shape :
       {Shape{1, 1, "fp32"}, Shape{1, 2, "fp32"}, Shape{1, 4, "fp16"}, Shape{2, 1, "fp32"},
        Shape{2, 2, "fp16"}, Shape{2, 2, "int8:start=2"}, Shape{2, 1, "onebit:start=1"},
        Shape{2, 1, "topk:ratio=0.1,start=2"}}) {
    const std::string expected = OnCpu(shape);
    for (const Told& told : OnGpu(&gpus, shape)) {
      EXPECT_EQ(told.path, "ipc");
      EXPECT_TRUE(told.result == expected)
          << shape.codec << ", " << shape.nodes << " nodes of " << shape.workers;
    }
  }
}

// PowerSGD's first factor is summed in another order than on a CPU, but in the same for all
// workers.
TEST_F(GpuPathGpuTest, WorkersOfAllNodesGetTheSameBitsOfPowerSgd) {
  CudaDevice gpus({device_}, nullptr);
  const Shape shape = {2, 2, "powersgd:rank=4,start=2,min_rate=1"};
  const std::vector<Told> all = OnGpu(&gpus, shape);
  for (const Told& told : all) {
    EXPECT_EQ(told.path, "ipc");
    EXPECT_EQ(told.result.size(), kLayout.Elems() * sizeof(float));
    EXPECT_TRUE(told.result == all[0].result);
  }
  EXPECT_FALSE(all[0].result == OnCpu({2, 2, "fp32"}));  // it has been compressed
}

TEST_F(GpuPathGpuTest, SidecarWithoutTheGpuGetsTheSameBitsThroughHostMemory) {
  const Shape shape = {1, 2, "fp16"};
  const std::string expected = OnCpu(shape);
  for (const Told& told : OnGpu(nullptr, shape)) {
    EXPECT_TRUE(told.path == "pinned" || told.path == "pageable") << told.path;
    EXPECT_TRUE(told.result == expected);
  }
}

}  // namespace
}  // namespace thalweg::gpu_path_gpu_test
