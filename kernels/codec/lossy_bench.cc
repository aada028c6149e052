// These benchmarks run the lossy formats on chunks of 1 MiB, taken in turn from a bucket of 64 MiB,
// so that gradients and residuals come from memory. Bytes are those of the fp32 elements: encoding
// one with feedback reads eight and writes four beside the payload. A copy of as many bytes is
// measured too.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "benchmark/benchmark.h"
#include "kernels/codec/lossy.h"

namespace thalweg {
namespace {

constexpr size_t kChunkElems = 1 << 18;
constexpr size_t kChunks = 64;
constexpr double kRatio = 0.01;

std::vector<float> Gradient(size_t elems) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 1e-3f);
  std::vector<float> values(elems);
  for (float& value : values) value = normal(random);
  return values;
}

void SetBytes(benchmark::State& state) {
  state.SetBytesProcessed(state.iterations() * static_cast<int64_t>(kChunkElems * sizeof(float)));
}

void BM_Encode(benchmark::State& state, WireFormat format, bool feedback) {
  const std::vector<float> values = Gradient(kChunks * kChunkElems);
  std::vector<float> residual(values.size());
  std::vector<std::byte> out(MaxEncodedBytes(format, kChunkElems));
  size_t chunk = 0;
  for (auto _ : state) {
    const size_t at = chunk++ % kChunks * kChunkElems;
    benchmark::DoNotOptimize(EncodeLossy(
        format, kRatio, &values[at], feedback ? &residual[at] : nullptr, kChunkElems, out.data()));
  }
  SetBytes(state);
}

Payload Encoding(WireFormat format, std::vector<std::byte>& bytes) {
  const std::vector<float> values = Gradient(kChunkElems);
  bytes.resize(MaxEncodedBytes(format, kChunkElems));
  bytes.resize(
      EncodeLossy(format, kRatio, values.data(), nullptr, kChunkElems, bytes.data()).bytes);
  return Payload(bytes, nullptr);
}

void BM_Decode(benchmark::State& state, WireFormat format) {
  std::vector<std::byte> bytes;
  const Payload payload = Encoding(format, bytes);
  std::vector<float> out(kChunks * kChunkElems);
  size_t chunk = 0;
  for (auto _ : state) {
    const size_t at = chunk++ % kChunks * kChunkElems;
    if (!DecodeLossy(payload, format, DType::kFloat32, kChunkElems, &out[at]).ok()) {
      state.SkipWithError("the decoding failed");
    }
  }
  SetBytes(state);
}

// The argument is the number of contributions. Bytes are those of the result's elements.
void BM_Fold(benchmark::State& state, WireFormat format) {
  std::vector<std::byte> bytes;
  const std::vector<Payload> contributions(static_cast<size_t>(state.range(0)),
                                           Encoding(format, bytes));
  const std::vector<uint32_t> workers(contributions.size(), 1);
  std::vector<float> residual(kChunks * kChunkElems);
  std::vector<std::byte> out(MaxFoldedBytes(contributions, format, kChunkElems));
  size_t chunk = 0;
  for (auto _ : state) {
    const size_t at = chunk++ % kChunks * kChunkElems;
    if (!FoldLossy(contributions, workers, format, kChunkElems, &residual[at], out.data()).ok()) {
      state.SkipWithError("the fold failed");
    }
  }
  SetBytes(state);
}

void BM_Memcpy(benchmark::State& state) {
  const std::vector<float> in = Gradient(kChunks * kChunkElems);
  std::vector<float> out(in.size());
  size_t chunk = 0;
  for (auto _ : state) {
    const size_t at = chunk++ % kChunks * kChunkElems;
    std::memcpy(&out[at], &in[at], kChunkElems * sizeof(float));
    benchmark::ClobberMemory();
  }
  SetBytes(state);
}
BENCHMARK(BM_Memcpy);

// Before main() of the library: the formats of the registry.
[[maybe_unused]] const bool kRegistered = [] {
  for (const LossyTraits& traits : kLossyTraits) {
    const std::string name = traits.name;
    const WireFormat format = traits.format;
    benchmark::RegisterBenchmark(("BM_Encode/" + name + "_feedback").c_str(), BM_Encode, format,
                                 true);
    benchmark::RegisterBenchmark(("BM_Encode/" + name).c_str(), BM_Encode, format, false);
    benchmark::RegisterBenchmark(("BM_Decode/" + name).c_str(), BM_Decode, format);
    benchmark::RegisterBenchmark(("BM_Fold/" + name).c_str(), BM_Fold, format)
        ->Arg(2)
        ->Arg(4)
        ->Arg(16);
  }
  return true;
}();

}  // namespace
}  // namespace thalweg
