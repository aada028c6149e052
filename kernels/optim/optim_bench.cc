// These benchmarks run steps of one tensor in one thread, and a triad of float32. Items are
// elements; bytes are read + written.
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "benchmark/benchmark.h"
#include "kernels/optim/optim.h"

namespace thalweg {
namespace {

constexpr int64_t kInCache = 1 << 14;
constexpr int64_t kInMemory = 1 << 22;

// A Memory is a tensor with `kStates` states in memory of its own; all zeros.
template <class Tensor, int kStates>
class Memory {
 public:
  Memory(uint64_t elems, DType param_type, DType grad_type, DType copy_type, bool copy)
      : param_(elems * SizeOf(param_type)),
        grad_(elems * SizeOf(grad_type)),
        copy_(copy ? elems * SizeOf(copy_type) : 0),
        states_(kStates, std::vector<float>(elems)) {
    tensor.param = param_.data();
    tensor.grad = grad_.data();
    tensor.copy = copy ? copy_.data() : nullptr;
    for (int i = 0; i < kStates; ++i) tensor.states[i] = states_[i].data();
    tensor.elems = elems;
    tensor.param_type = param_type;
    tensor.grad_type = grad_type;
    tensor.copy_type = copy_type;
    index.Add(elems, StepBytes(tensor));
  }

  Tensor tensor;
  FlatIndex index;

 private:
  std::vector<std::byte> param_;
  std::vector<std::byte> grad_;
  std::vector<std::byte> copy_;
  std::vector<std::vector<float>> states_;
};

void Count(benchmark::State& state, uint64_t bytes) {
  state.SetItemsProcessed(state.iterations() * state.range(0));
  state.SetBytesProcessed(state.iterations() * static_cast<int64_t>(bytes));
}

void BM_Adam(benchmark::State& state, DType param_type, DType grad_type, bool copy) {
  Memory<AdamTensor, 2> memory(static_cast<uint64_t>(state.range(0)), param_type, grad_type,
                               DType::kFloat16, copy);
  for (auto _ : state) {
    RunAdam(std::span(&memory.tensor, 1), memory.index, 0, memory.index.Size());
    benchmark::ClobberMemory();
  }
  Count(state, memory.index.Size());
}
BENCHMARK_CAPTURE(BM_Adam, fp32, DType::kFloat32, DType::kFloat32, false)
    ->Arg(kInCache)
    ->Arg(kInMemory);
BENCHMARK_CAPTURE(BM_Adam, bf16, DType::kBFloat16, DType::kBFloat16, false)
    ->Arg(kInCache)
    ->Arg(kInMemory);
BENCHMARK_CAPTURE(BM_Adam, fp32_master_of_fp16, DType::kFloat32, DType::kFloat16, true)
    ->Arg(kInCache)
    ->Arg(kInMemory);

void BM_Sgd(benchmark::State& state) {
  Memory<SgdTensor, 1> memory(static_cast<uint64_t>(state.range(0)), DType::kFloat32,
                              DType::kFloat32, DType::kFloat32, /*copy=*/false);
  for (auto _ : state) {
    RunSgd(std::span(&memory.tensor, 1), memory.index, 0, memory.index.Size());
    benchmark::ClobberMemory();
  }
  Count(state, memory.index.Size());
}
BENCHMARK(BM_Sgd)->Arg(kInCache)->Arg(kInMemory);

// Computes the norm of gradients, which clipping takes before the step.
void BM_GradSquares(benchmark::State& state, DType grad_type) {
  Memory<OptimTensor, 0> memory(static_cast<uint64_t>(state.range(0)), grad_type, grad_type,
                                DType::kFloat32, /*copy=*/false);
  const FlatIndex& index = memory.index;
  std::vector<double> sums(index.Granules());
  for (auto _ : state) {
    RunGradSquares(std::span(&memory.tensor, 1), index, 0, index.Size(), sums.data());
    benchmark::ClobberMemory();
  }
  Count(state, static_cast<uint64_t>(state.range(0)) * SizeOf(grad_type));
}
BENCHMARK_CAPTURE(BM_GradSquares, fp32, DType::kFloat32)->Arg(kInCache)->Arg(kInMemory);
BENCHMARK_CAPTURE(BM_GradSquares, bf16, DType::kBFloat16)->Arg(kInCache)->Arg(kInMemory);

// Runs all three phases: the norm of gradients, moments, parameters.
void BM_Lamb(benchmark::State& state) {
  Memory<LambTensor, 2> memory(static_cast<uint64_t>(state.range(0)), DType::kFloat32,
                               DType::kFloat32, DType::kFloat32, /*copy=*/false);
  const FlatIndex& index = memory.index;
  const OptimTensor gradient = memory.tensor;
  std::vector<double> grads(index.Granules());
  std::vector<double> params(index.Granules());
  std::vector<double> updates(index.Granules());
  for (auto _ : state) {
    RunGradSquares(std::span(&gradient, 1), index, 0, index.Size(), grads.data());
    RunLambMoments(std::span(&memory.tensor, 1), index, 0, index.Size(), params.data(),
                   updates.data());
    RunLambStep(std::span(&memory.tensor, 1), index, 0, index.Size());
    benchmark::ClobberMemory();
  }
  // Counts gradients once more than StepBytes(), and parameters and moments for the last phase.
  Count(state, index.Size() + static_cast<uint64_t>(state.range(0)) * 16);
}
BENCHMARK(BM_Lamb)->Arg(kInCache)->Arg(kInMemory);

void BM_Triad(benchmark::State& state) {
  std::vector<float> a(static_cast<size_t>(state.range(0)));
  std::vector<float> b(a.size());
  for (auto _ : state) {
    for (size_t i = 0; i < a.size(); ++i) a[i] += 1e-3f * b[i];
    benchmark::ClobberMemory();
  }
  Count(state, a.size() * 12);
}
BENCHMARK(BM_Triad)->Arg(kInCache)->Arg(kInMemory);

}  // namespace
}  // namespace thalweg
