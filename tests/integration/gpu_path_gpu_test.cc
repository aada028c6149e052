// The path of gradients that stay on a GPU, on a real one: a sidecar in this process, its workers
// in processes of their own, since CUDA's handles are for other processes.
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
#include "tests/integration/made_gradient.h"

namespace thalweg {
namespace {

constexpr size_t kElems = 1'000'003;
constexpr uint64_t kRounds = 3;
const BucketLayout kLayout{DType::kFloat32, {{"w", {kElems}}}};

// What a worker has written; empty when it failed.
std::string Output(const std::string& command) {
  std::FILE* const pipe = popen(command.c_str(), "r");
  std::string output;
  std::vector<char> buffer(1 << 20);
  for (size_t n = 0; (n = std::fread(buffer.data(), 1, buffer.size(), pipe)) > 0;) {
    output.append(buffer.data(), n);
  }
  return pclose(pipe) == 0 ? output : "";
}

std::vector<std::string> OnGpu(Device* gpus, const char* codec, uint32_t workers) {
  Cluster cluster(1, workers, 2, {}, 0, [&](uint32_t) { return gpus; });
  const auto worker =
      std::filesystem::read_symlink("/proc/self/exe").parent_path() / "gpu_path_worker";
  std::vector<std::future<std::string>> pending;
  for (uint32_t rank = 0; rank < workers; ++rank) {
    const std::string command = absl::StrCat(worker.string(), " ", cluster.SocketPath(0), " ", rank,
                                             " ", workers, " ", codec, " ", kElems, " ", kRounds);
    pending.push_back(std::async(std::launch::async, [command] { return Output(command); }));
  }
  std::vector<std::string> outputs;
  for (auto& output : pending) outputs.push_back(output.get());
  return outputs;
}

// The same job with gradients in host memory.
std::string OnCpu(const char* codec, uint32_t workers) {
  Cluster cluster(1, workers, 2);
  const auto sessions = cluster.ConnectAll(
      [&](SessionOptions& options) { options.codec = *CodecPolicy::Parse(codec); });
  std::vector<std::byte> last;
  for (const auto& session : sessions) {
    EXPECT_TRUE((*session)->RegisterBucket({0, 0}, kLayout).ok());
  }
  for (uint64_t round = 1; round <= kRounds; ++round) {
    std::vector<std::vector<float>> gradients;
    std::vector<std::future<Outcome>> pending;
    for (uint32_t rank = 0; rank < sessions.size(); ++rank) {
      gradients.push_back(MadeGradient(rank, round, kElems));
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
  for (const char* codec : {"fp32", "fp16"}) {
    for (const uint32_t workers : {1u, 2u, 4u}) {
      const std::string expected = OnCpu(codec, workers);
      for (const std::string& output : OnGpu(&gpus, codec, workers)) {
        EXPECT_TRUE(output == expected) << codec << ", " << workers << " workers";
      }
    }
  }
}

TEST_F(GpuPathGpuTest, SidecarWithoutTheGpuGetsTheSameBitsThroughHostMemory) {
  const std::string expected = OnCpu("fp16", 2);
  for (const std::string& output : OnGpu(nullptr, "fp16", 2)) EXPECT_TRUE(output == expected);
}

}  // namespace
}  // namespace thalweg
