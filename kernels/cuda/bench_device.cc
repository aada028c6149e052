#include "kernels/cuda/bench_device.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "kernels/launch/count_launches.h"

namespace thalweg {
namespace {

constexpr int kWarmups = 3;
constexpr int kRepetitions = 21;
// The copied array is several times as large as a GPU's cache.
constexpr uint64_t kCopiedBytes = uint64_t{256} << 20;

[[noreturn]] void End(const char* what, const char* why) {
  std::fprintf(stderr, "error: %s: %s\n", what, why);
  std::exit(1);
}

}  // namespace

void Require(cudaError_t error, const char* what) {
  if (error != cudaSuccess) End(what, cudaGetErrorString(error));
}

void Require(const absl::Status& status) {
  if (!status.ok()) End("a launch failed", status.ToString().c_str());
}

Bench::Bench(int argc, char** argv) : only_(argc > 1 ? argv[1] : ""), was_met_(only_.empty()) {
  cudaDeviceProp properties;
  Require(cudaGetDeviceProperties(&properties, 0), "no GPU");
  Require(cudaStreamCreate(&stream_), "cudaStreamCreate");
  Require(cudaEventCreate(&begin_), "cudaEventCreate");
  Require(cudaEventCreate(&end_), "cudaEventCreate");
  std::printf("{\n  \"gpu\": \"%s\",\n  \"repetitions\": %d,\n  \"rows\": [", properties.name,
              kRepetitions);
  const DeviceArray<std::byte> from(kCopiedBytes);
  const DeviceArray<std::byte> to(kCopiedBytes);
  Run("copy", 2 * kCopiedBytes, [&](CudaStream stream) {
    Require(cudaMemcpyAsync(to.get(), from.get(), kCopiedBytes, cudaMemcpyDeviceToDevice, stream),
            "a copy");
    return absl::OkStatus();
  });
}

Bench::~Bench() {
  std::printf("\n  ]\n}\n");
  if (!was_met_) End("no such case", only_.c_str());
  cudaEventDestroy(end_);
  cudaEventDestroy(begin_);
  cudaStreamDestroy(stream_);
}

float Bench::MedianMs(const Work& work) const {
  for (int i = 0; i < kWarmups; ++i) Require(work(stream_));
  std::vector<float> times(kRepetitions);
  for (float& time : times) {
    Require(cudaEventRecord(begin_, stream_), "cudaEventRecord");
    Require(work(stream_));
    Require(cudaEventRecord(end_, stream_), "cudaEventRecord");
    Require(cudaEventSynchronize(end_), "waiting for the GPU");
    Require(cudaEventElapsedTime(&time, begin_, end_), "cudaEventElapsedTime");
  }
  std::nth_element(times.begin(), times.begin() + kRepetitions / 2, times.end());
  return times[kRepetitions / 2];
}

void Bench::Run(const std::string& name, uint64_t bytes, const Work& work) {
  const bool is_first = copy_rate_ == 0;
  if (!is_first && !only_.empty() && name != only_) return;
  was_met_ = was_met_ || !is_first;
  const float ms = MedianMs(work);
  const absl::StatusOr<uint64_t> launches = CountLaunches(work);
  Require(launches.status());
  const double rate = static_cast<double>(bytes) / ms / 1e6;
  if (is_first) copy_rate_ = rate;
  std::printf(
      "%s\n    {\"case\": \"%s\", \"bytes\": %llu, \"ms\": %.5f, \"gb_per_s\": %.1f, "
      "\"of_copy\": %.3f, \"launches\": %llu}",
      is_first ? "" : ",", name.c_str(), static_cast<unsigned long long>(bytes), ms, rate,
      rate / copy_rate_, static_cast<unsigned long long>(*launches));
  std::fflush(stdout);  // whoever stops the program has the rows until then
}

}  // namespace thalweg
