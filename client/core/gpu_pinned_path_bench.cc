// This benchmark compares the pinned path with copies of the same size from and to memory that CUDA
// has allocated, in the same run. It prints JSON: for each case the bytes that cross the bus, the
// time of the median repetition until the host knows that they have, the time of the calls alone,
// and the rate as a fraction of the plain copy's in that direction.
#include <cuda_runtime_api.h>
#include <fcntl.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "client/core/pinned_path.h"
#include "core/base/testing/test_patience.h"

namespace thalweg {
namespace {

constexpr int kWarmups = 3;
constexpr int kRepetitions = 21;
constexpr uint64_t kChunkBytes = uint64_t{1} << 20;

void Require(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "error: %s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

void Require(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "error: %s\n", status.ToString().c_str());
  std::exit(1);
}

template <class T>
T Require(absl::StatusOr<T> value) {
  Require(value.status());
  return *std::move(value);
}

// Times are in milliseconds.
struct Times {
  double call = 0;  // until the calls return
  double done = 0;  // until the bytes are there
};

Times Median(const std::function<void()>& call, const std::function<void()>& wait) {
  std::vector<double> calls;
  std::vector<double> dones;
  for (int i = -kWarmups; i < kRepetitions; ++i) {
    const TimePoint start = Now();
    call();
    const TimePoint called = Now();
    wait();
    if (i < 0) continue;
    calls.push_back(ToSeconds(called - start) * 1e3);
    dones.push_back(ToSeconds(Now() - start) * 1e3);
  }
  std::sort(calls.begin(), calls.end());
  std::sort(dones.begin(), dones.end());
  return {calls[kRepetitions / 2], dones[kRepetitions / 2]};
}

void Print(const std::string& name, uint64_t bytes, const Times& times, const Times& copy) {
  static bool first = true;
  std::printf(
      "%s\n    {\"case\": \"%s\", \"bytes\": %llu, \"ms\": %.5f, \"call_ms\": %.5f, "
      "\"gb_per_s\": %.1f, \"of_copy\": %.3f}",
      std::exchange(first, false) ? "" : ",", name.c_str(), static_cast<unsigned long long>(bytes),
      times.done, times.call, static_cast<double>(bytes) / times.done / 1e6,
      copy.done / times.done);
}

// Measures one bucket in both directions.
void BenchBucket(PinnedPath& path, cudaStream_t stream, DeviceRuntime& device, uint64_t bytes) {
  void* memory = nullptr;
  void* allocated = nullptr;
  Require(cudaMalloc(&memory, bytes), "cudaMalloc");
  Require(cudaMallocHost(&allocated, bytes), "cudaMallocHost");
  const auto copy = [&](void* to, const void* from, cudaMemcpyKind kind) {
    return Median([&] { Require(cudaMemcpyAsync(to, from, bytes, kind, stream), "a copy"); },
                  [&] { Require(cudaStreamSynchronize(stream), "a copy"); });
  };
  const Times out = copy(allocated, memory, cudaMemcpyDeviceToHost);
  const Times in = copy(memory, allocated, cudaMemcpyHostToDevice);

  auto input = std::make_shared<BucketArena>(Require(BucketArena::Create("input", bytes, true)));
  const auto written = Require(BucketArena::Create("result", bytes, true));
  UniqueFd fd(fcntl(written.fd(), F_DUPFD_CLOEXEC, 0));
  const auto result =
      std::make_shared<const BucketArena>(Require(BucketArena::Open(std::move(fd), bytes)));
  const auto lane = Require(path.OpenLane(input, bytes));
  const auto plan =
      ChunkPlan::For(bytes / 4, DType::kFloat32, WireFormat::kFloat32, kChunkBytes, 1);
  const auto producer = reinterpret_cast<DeviceStream>(stream);
  const DeviceGradient gradient{{static_cast<std::byte*>(memory), bytes}, producer, nullptr};
  const Times send = Median(
      [&] {
        input->ResetReady();
        Require(path.Send(lane, gradient, plan));
      },
      [&] { input->WaitReady(plan.Count(), Now() + kTestPatience); });
  const Times fetch =
      Median([&] { Require(device.Wait(producer, Require(path.Fetch(lane, result, gradient)))); },
             [&] { Require(cudaStreamSynchronize(stream), "a result"); });

  const std::string size = std::to_string(bytes >> 20) + " MiB";
  Print("copy to the host, " + size, bytes, out, out);
  Print("gradient, " + size, bytes, send, out);
  Print("copy to the device, " + size, bytes, in, in);
  Print("result, " + size, bytes, fetch, in);
  Require(cudaFreeHost(allocated), "cudaFreeHost");
  Require(cudaFree(memory), "cudaFree");
}

void RunAll() {
  const auto device = Require(OpenCudaDevice(0));
  Require(device->BindThread());
  cudaDeviceProp properties;
  Require(cudaGetDeviceProperties(&properties, 0), "no GPU");
  cudaStream_t stream = nullptr;
  Require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  const auto path = Require(PinnedPath::Create(device));
  std::printf("{\n  \"gpu\": \"%s\",\n  \"repetitions\": %d,\n  \"path\": \"%s\",\n  \"rows\": [",
              properties.name, kRepetitions, Name(path->path()));
  for (const uint64_t mib : {1, 25, 256}) BenchBucket(*path, stream, *device, mib << 20);
  std::printf("\n  ]\n}\n");
  path->Close(Now() + kTestPatience);
  Require(cudaStreamDestroy(stream), "cudaStreamDestroy");
}

}  // namespace
}  // namespace thalweg

int main() { thalweg::RunAll(); }
