// These benchmarks run folds and a copy. Bytes are read + written, so that rates can be compared.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "benchmark/benchmark.h"
#include "kernels/reduce/reduce.h"

namespace thalweg {
namespace {

// The arguments are the numbers of inputs and of elements. Inputs lie at odd addresses.
void BM_FoldMean(benchmark::State& state, DType in, DType out_type) {
  const auto count = static_cast<size_t>(state.range(0));
  const auto elems = static_cast<size_t>(state.range(1));
  const std::vector<std::vector<std::byte>> inputs(count,
                                                   std::vector<std::byte>(elems * SizeOf(in) + 1));
  std::vector<const void*> pointers;
  for (const auto& input : inputs) pointers.push_back(input.data() + 1);
  const std::vector<float> weights(count, 1.0f);
  std::vector<std::byte> out(elems * SizeOf(out_type));
  for (auto _ : state) {
    benchmark::DoNotOptimize(
        FoldMean(pointers, weights, static_cast<float>(count), in, out_type, out.data(), elems));
  }
  state.SetBytesProcessed(state.iterations() *
                          static_cast<int64_t>(count * elems * SizeOf(in) + out.size()));
}

void InCacheAndInMemory(benchmark::internal::Benchmark* bench) {
  for (int64_t elems : {1 << 13, 1 << 23}) {
    for (int64_t count : {1, 2, 4, 8}) bench->Args({count, elems});
  }
}
BENCHMARK_CAPTURE(BM_FoldMean, fp32, DType::kFloat32, DType::kFloat32)->Apply(InCacheAndInMemory);
BENCHMARK_CAPTURE(BM_FoldMean, fp16, DType::kFloat16, DType::kFloat16)->Apply(InCacheAndInMemory);
BENCHMARK_CAPTURE(BM_FoldMean, bf16, DType::kBFloat16, DType::kBFloat16)->Apply(InCacheAndInMemory);
BENCHMARK_CAPTURE(BM_FoldMean, fp64, DType::kFloat64, DType::kFloat64)->Apply(InCacheAndInMemory);
BENCHMARK_CAPTURE(BM_FoldMean, fp32_to_fp16, DType::kFloat32, DType::kFloat16)
    ->Apply(InCacheAndInMemory);
BENCHMARK_CAPTURE(BM_FoldMean, fp32_to_bf16, DType::kFloat32, DType::kBFloat16)
    ->Apply(InCacheAndInMemory);

void BM_Memcpy(benchmark::State& state) {
  const std::vector<std::byte> in(static_cast<size_t>(state.range(0)));
  std::vector<std::byte> out(in.size());
  for (auto _ : state) {
    std::memcpy(out.data(), in.data(), in.size());
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * 2 * state.range(0));
}
BENCHMARK(BM_Memcpy)->Arg(1 << 15)->Arg(1 << 25);

}  // namespace
}  // namespace thalweg
