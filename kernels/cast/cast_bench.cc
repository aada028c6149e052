// These benchmarks run casts, and a copy of as many input bytes. Items are elements; bytes are read
// + written.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "benchmark/benchmark.h"
#include "kernels/cast/cast.h"

namespace thalweg {
namespace {

constexpr int64_t kInCache = 1 << 15;
constexpr int64_t kInMemory = 1 << 24;

void BM_Cast(benchmark::State& state, DType from, DType to) {
  const auto elems = static_cast<size_t>(state.range(0));
  const std::vector<std::byte> in(elems * SizeOf(from));
  std::vector<std::byte> out(elems * SizeOf(to));
  for (auto _ : state) {
    Cast(from, in.data(), to, out.data(), elems);
    benchmark::ClobberMemory();
  }
  state.SetItemsProcessed(state.iterations() * state.range(0));
  state.SetBytesProcessed(state.iterations() * static_cast<int64_t>(in.size() + out.size()));
}
BENCHMARK_CAPTURE(BM_Cast, fp32_to_fp16, DType::kFloat32, DType::kFloat16)
    ->Arg(kInCache)
    ->Arg(kInMemory);
BENCHMARK_CAPTURE(BM_Cast, fp32_to_bf16, DType::kFloat32, DType::kBFloat16)
    ->Arg(kInCache)
    ->Arg(kInMemory);
BENCHMARK_CAPTURE(BM_Cast, fp16_to_fp32, DType::kFloat16, DType::kFloat32)
    ->Arg(kInCache)
    ->Arg(kInMemory);
BENCHMARK_CAPTURE(BM_Cast, bf16_to_fp32, DType::kBFloat16, DType::kFloat32)
    ->Arg(kInCache)
    ->Arg(kInMemory);

void BM_Memcpy(benchmark::State& state) {
  const std::vector<float> in(static_cast<size_t>(state.range(0)));
  std::vector<float> out(in.size());
  for (auto _ : state) {
    std::memcpy(out.data(), in.data(), in.size() * sizeof(float));
    benchmark::ClobberMemory();
  }
  state.SetItemsProcessed(state.iterations() * state.range(0));
  state.SetBytesProcessed(state.iterations() * static_cast<int64_t>(2 * in.size() * sizeof(float)));
}
BENCHMARK(BM_Memcpy)->Arg(kInCache)->Arg(kInMemory);

}  // namespace
}  // namespace thalweg
