// The CUDA kernels beside a copy on the same GPU, in the same run. Prints JSON: for each case the
// bytes that must be read and written at least (each input once, each output once), the time of the
// median repetition, and the rate as a share of the copy's.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "core/base/wire_format.h"
#include "kernels/cast/cast_cuda.h"
#include "kernels/codec/int8_cuda.h"
#include "kernels/codec/onebit_cuda.h"
#include "kernels/codec/topk.h"
#include "kernels/codec/topk_cuda.h"
#include "kernels/reduce/reduce_cuda.h"

namespace thalweg {
namespace {

constexpr int kWarmups = 3;
constexpr int kRepetitions = 21;
// Arrays of 256 MiB: several times what a GPU's cache holds.
constexpr uint64_t kElems = uint64_t{64} << 20;
constexpr uint64_t kChunkElems = uint64_t{1} << 18;
constexpr double kRatio = 0.01;

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

// Device memory until the program ends.
template <class T>
T* Allocate(uint64_t elems) {
  void* memory = nullptr;
  Require(cudaMalloc(&memory, elems * sizeof(T)), "cudaMalloc");
  Require(cudaMemset(memory, 0, elems * sizeof(T)), "cudaMemset");
  return static_cast<T*>(memory);
}

// Numbers around 1e-3 of either sign, as gradients have them.
float* Gradient() {
  std::vector<float> values(kElems);
  uint64_t state = 1;
  for (float& value : values) {
    float sum = 0;
    for (int i = 0; i < 4; ++i) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      sum += static_cast<float>(state >> 40) * 0x1p-24f - 0.5f;
    }
    value = sum * 1e-3f;
  }
  float* const memory = Allocate<float>(kElems);
  Require(cudaMemcpy(memory, values.data(), kElems * sizeof(float), cudaMemcpyHostToDevice),
          "copying a gradient to the GPU");
  return memory;
}

class Bench {
 public:
  Bench() {
    Require(cudaEventCreate(&begin_), "cudaEventCreate");
    Require(cudaEventCreate(&end_), "cudaEventCreate");
  }

  // `reads_and_writes`: bytes that `work` cannot do without.
  void Run(const std::string& name, uint64_t reads_and_writes, const std::function<void()>& work) {
    for (int i = 0; i < kWarmups; ++i) work();
    std::vector<float> times(kRepetitions);
    for (float& time : times) {
      Require(cudaEventRecord(begin_), "cudaEventRecord");
      work();
      Require(cudaEventRecord(end_), "cudaEventRecord");
      Require(cudaEventSynchronize(end_), name.c_str());
      Require(cudaEventElapsedTime(&time, begin_, end_), "cudaEventElapsedTime");
    }
    std::sort(times.begin(), times.end());
    const double rate = static_cast<double>(reads_and_writes) / times[kRepetitions / 2] / 1e6;
    if (copy_rate_ == 0) copy_rate_ = rate;  // the copy is the first
    std::printf(
        "%s\n    {\"case\": \"%s\", \"bytes\": %llu, \"ms\": %.5f, \"gb_per_s\": %.1f, "
        "\"of_copy\": %.3f}",
        first_ ? "" : ",", name.c_str(), static_cast<unsigned long long>(reads_and_writes),
        times[kRepetitions / 2], rate, rate / copy_rate_);
    first_ = false;
  }

 private:
  cudaEvent_t begin_;
  cudaEvent_t end_;
  double copy_rate_ = 0;
  bool first_ = true;
};

void BenchFolds(Bench& bench, const std::vector<const void*>& inputs, void* out,
                uint64_t* nonfinite) {
  const struct {
    DType in;
    DType out;
  } types[] = {{DType::kFloat32, DType::kFloat32},
               {DType::kFloat16, DType::kFloat16},
               {DType::kBFloat16, DType::kBFloat16},
               {DType::kFloat32, DType::kFloat16}};
  for (auto [in, out_type] : types) {
    for (size_t count : {2, 4, 8}) {
      const std::vector<float> weights(count, 1.0f);
      const std::span<const void* const> used(inputs.data(), count);
      bench.Run(
          std::string("fold ") + Name(in) + " to " + Name(out_type) + " x" + std::to_string(count),
          kElems * (count * SizeOf(in) + SizeOf(out_type)), [&, in = in, type = out_type] {
            Require(FoldMeanOnDevice(nullptr, used, weights, static_cast<float>(count), in, type,
                                     out, kElems, nonfinite));
          });
    }
  }
}

void BenchCasts(Bench& bench, const void* in, void* out) {
  for (DType half : {DType::kFloat16, DType::kBFloat16}) {
    for (auto [from, to] : {std::pair{DType::kFloat32, half}, {half, DType::kFloat32}}) {
      bench.Run(
          std::string("cast ") + Name(from) + " to " + Name(to), kElems * 6,
          [&, from = from, to = to] { Require(CastOnDevice(nullptr, from, in, to, out, kElems)); });
    }
  }
}

void BenchBlockFormats(Bench& bench, const float* values, float* residual, float* decoded,
                       uint64_t* nonfinite) {
  const struct {
    WireFormat format;
    decltype(&EncodeInt8OnDevice) encode;
    decltype(&DecodeInt8OnDevice) decode;
  } formats[] = {{WireFormat::kInt8, &EncodeInt8OnDevice, &DecodeInt8OnDevice},
                 {WireFormat::kOneBit, &EncodeOneBitOnDevice, &DecodeOneBitOnDevice}};
  for (const auto& format : formats) {
    const uint64_t payload_bytes = MaxEncodedBytes(format.format, kElems);
    auto* const payload = Allocate<std::byte>(payload_bytes);
    const std::string name = Name(format.format);
    bench.Run(name + " encode with feedback", kElems * 12 + payload_bytes, [&] {
      Require(format.encode(nullptr, values, residual, kElems, payload, nonfinite));
    });
    bench.Run(name + " encode", kElems * 4 + payload_bytes, [&] {
      Require(format.encode(nullptr, values, nullptr, kElems, payload, nonfinite));
    });
    bench.Run(name + " decode", kElems * 4 + payload_bytes,
              [&] { Require(format.decode(nullptr, payload, kElems, decoded)); });
  }
}

void BenchTopK(Bench& bench, const float* values, float* residual) {
  auto* const out = Allocate<std::byte>(MaxEncodedBytes(WireFormat::kTopK, kElems));
  auto* const scratch = Allocate<std::byte>(TopKScratchBytes(kElems));
  auto* const encoded = Allocate<Encoded>(1);
  for (uint64_t elems : {kElems, kChunkElems}) {
    const uint64_t count = TopKCount(kRatio, elems);
    const std::string name = "topk 1 % encode of " + std::to_string(elems) + " elements";
    bench.Run(name + " with feedback", elems * 12, [&] {
      Require(EncodeTopKOnDevice(nullptr, values, residual, elems, count, out, encoded, scratch));
    });
    bench.Run(name, elems * 4, [&] {
      Require(EncodeTopKOnDevice(nullptr, values, nullptr, elems, count, out, encoded, scratch));
    });
  }
}

void RunAll() {
  cudaDeviceProp properties;
  Require(cudaGetDeviceProperties(&properties, 0), "no GPU");
  std::printf("{\n  \"gpu\": \"%s\",\n  \"repetitions\": %d,\n  \"rows\": [", properties.name,
              kRepetitions);
  float* const values = Gradient();
  auto* const residual = Allocate<float>(kElems);
  auto* const out = Allocate<float>(kElems);
  auto* const nonfinite = Allocate<uint64_t>(1);
  std::vector<const void*> inputs = {values};
  while (inputs.size() < 8) inputs.push_back(Allocate<float>(kElems));
  Bench bench;
  bench.Run("copy", kElems * 8, [&] {
    Require(cudaMemcpyAsync(out, values, kElems * 4, cudaMemcpyDeviceToDevice, nullptr), "a copy");
  });
  BenchFolds(bench, inputs, out, nonfinite);
  BenchCasts(bench, values, out);
  BenchBlockFormats(bench, values, residual, out, nonfinite);
  BenchTopK(bench, values, residual);
  std::printf("\n  ]\n}\n");
}

}  // namespace
}  // namespace thalweg

int main() { thalweg::RunAll(); }
