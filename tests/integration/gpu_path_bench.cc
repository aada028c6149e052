// A node's workers share a GPU and reduce a bucket, with a sidecar that works on that GPU (path A)
// and with one that does not (path B). Prints JSON: for each case the bucket's bytes, the median
// repetition's time until the gradient holds the result, the time of the submitting call alone, and
// the time of two copies on the GPU, which is what a worker's GPU does on path A. gpu_path_bench
// SOCKET RANK WORKERS MIB runs a worker; that of rank 0 prints.
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "core/device/device_runtime.h"
#include "server/base/log.h"
#include "server/sidecar/cuda/cuda_device.h"
#include "tests/integration/cluster.h"
#include "tests/integration/gpu_worker.h"

namespace thalweg {
namespace {

constexpr int kWarmups = 3;
constexpr int kRepetitions = 21;
constexpr int kPairs = 10;  // copies per repetition, so that the wait for them hardly counts

uint32_t Number(const char* text) {
  uint32_t number = 0;
  if (!absl::SimpleAtoi(text, &number)) std::abort();
  return number;
}

double MedianMs(std::vector<Duration> times) {
  times.erase(times.begin(), times.begin() + kWarmups);
  std::nth_element(times.begin(), times.begin() + kRepetitions / 2, times.end());
  return ToSeconds(times[kRepetitions / 2]) * 1e3;
}

absl::Status Work(char** argv) {
  const uint32_t rank = Number(argv[2]);
  const uint64_t elems = (uint64_t{Number(argv[4])} << 20) / sizeof(float);
  const GpuWorker::Place place = {.workers = Number(argv[3]), .rank = rank};
  const BucketLayout layout{DType::kFloat32, {{"w", {static_cast<int64_t>(elems)}}}};
  THALWEG_ASSIGN_OR_RETURN(const auto worker, GpuWorker::Connect(argv[1], place, "fp32", layout));
  THALWEG_RETURN_IF_ERROR(worker->Fill(std::vector<float>(elems, 1.0f)));
  THALWEG_RETURN_IF_ERROR(worker->Finish());
  std::vector<Duration> calls(kWarmups + kRepetitions), rounds(calls), copies(calls);
  for (size_t i = 0; i < rounds.size(); ++i) {
    const TimePoint begin = Now();
    THALWEG_RETURN_IF_ERROR(worker->Reduce(&calls[i]));
    THALWEG_RETURN_IF_ERROR(worker->Finish());
    rounds[i] = Now() - begin;
  }
  for (Duration& copy : copies) {
    const TimePoint begin = Now();
    for (int i = 0; i < 2 * kPairs; ++i) THALWEG_RETURN_IF_ERROR(worker->Copy());
    THALWEG_RETURN_IF_ERROR(worker->Finish());
    copy = (Now() - begin) / kPairs;
  }
  if (rank > 0) return absl::OkStatus();
  std::printf(
      "{\"case\": \"path %s, %s workers, %s MiB\", \"bytes\": %zu, \"ms\": %.5f, "
      "\"call_ms\": %.5f, \"two_copies_ms\": %.5f}",
      Name(worker->path()), argv[3], argv[4], worker->bytes(), MedianMs(rounds), MedianMs(calls),
      MedianMs(copies));
  return absl::OkStatus();
}

// Returns false when a worker has failed, which has reported why.
bool BenchCase(Device* gpus, uint32_t workers, uint32_t mib, const char* separator) {
  Cluster cluster(1, workers, 1, {}, 0, [&](uint32_t) { return gpus; });
  const std::string self = std::filesystem::read_symlink("/proc/self/exe");
  std::vector<std::FILE*> pipes;
  for (uint32_t rank = 0; rank < workers; ++rank) {
    const std::string command =
        absl::StrCat(self, " ", cluster.SocketPath(0), " ", rank, " ", workers, " ", mib);
    pipes.push_back(popen(command.c_str(), "r"));
  }
  std::array<char, 512> line = {};
  bool is_well = std::fgets(line.data(), line.size(), pipes[0]) != nullptr;
  for (std::FILE* const pipe : pipes) is_well &= pclose(pipe) == 0;
  if (is_well) std::printf("%s\n    %s", separator, line.data());
  std::fflush(stdout);  // whoever stops the program has the rows until then
  return is_well;
}

bool BenchAll(Device* gpus) {
  const char* separator = "";
  std::printf("{\n  \"repetitions\": %d,\n  \"rows\": [", kRepetitions);
  for (Device* const device : {gpus, static_cast<Device*>(nullptr)}) {
    for (const uint32_t workers : {1, 2, 4}) {
      for (const uint32_t mib : {1, 25, 256}) {
        if (!BenchCase(device, workers, mib, separator)) return false;
        separator = ",";
      }
    }
  }
  std::printf("\n  ]\n}\n");
  return true;
}

}  // namespace
}  // namespace thalweg

int main(int argc, char** argv) {
  if (argc != 1 && argc != 5) {
    std::fprintf(stderr, "usage: gpu_path_bench [SOCKET RANK WORKERS MIB]\n");
    return 2;
  }
  absl::Status status;
  if (argc == 5) {
    status = thalweg::Work(argv);
  } else {
    // otherwise the sidecar's log would be mixed into the JSON
    thalweg::InitLogging("gpu_path_bench");
    auto gpu = thalweg::OpenCudaDevice(0);
    status = gpu.status();
    if (gpu.ok()) {
      thalweg::CudaDevice gpus({*std::move(gpu)}, nullptr);
      if (!thalweg::BenchAll(&gpus)) return 1;
    }
  }
  if (status.ok()) return 0;
  std::fprintf(stderr, "error: %s\n", std::string(status.message()).c_str());
  return 1;
}
