// These benchmarks update the weights of a bucket of 64 MiB chunk by chunk, in one thread, as a
// shard does, beside a triad of float32 over as much memory. Items are elements; bytes are those of
// means, weights, moments and results that have to be read or written.
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "benchmark/benchmark.h"
#include "server/round/update.h"

namespace thalweg {
namespace {

constexpr uint64_t kChunkElems = 256 << 10;  // a chunk of 1 MiB
constexpr uint64_t kChunks = 64;
const BucketLayout kLayout{DType::kFloat32, {{"w", {kChunkElems}}}};

// The chunks of a bucket, with a mean that has come for each.
class Shard {
 public:
  explicit Shard(const UpdateRule& rule)
      : rule_(rule), pieces_(PiecesOf(kLayout, rule, ChunkPlan{kChunkElems, kChunkElems})[0]) {
    for (uint32_t chunk = 0; chunk < kChunks; ++chunk) {
      states_.push_back(std::make_unique<ChunkState>(kChunkElems));
      MutexLock lock(states_.back()->mutex);
      states_.back()->weights.params.assign(kChunkElems, 1);
      const auto values = std::make_shared<std::vector<float>>(kChunkElems, 1e-3F);
      RoundResult& mean = means_.emplace_back();
      mean.id = {{0, 0, 0}, chunk, 1};
      mean.elems = kChunkElems;
      mean.payload = Payload(std::as_bytes(std::span(*values)), values);
    }
  }

  // Does a step; returns whether it could.
  bool Step(const UpdateStep& step) {
    bool ok = true;
    for (uint32_t chunk = 0; chunk < kChunks; ++chunk) {
      const auto result = UpdateWeights(means_[chunk], rule_, pieces_, step, *states_[chunk]);
      ok = ok && result.ok();
    }
    return ok;
  }

 private:
  const UpdateRule rule_;
  const std::vector<UpdatePiece> pieces_;
  std::vector<std::unique_ptr<ChunkState>> states_;
  std::vector<RoundResult> means_;
};

void Count(benchmark::State& state, uint64_t bytes_per_elem) {
  const auto elems = static_cast<int64_t>(state.iterations() * kChunks * kChunkElems);
  state.SetItemsProcessed(elems);
  state.SetBytesProcessed(elems * static_cast<int64_t>(bytes_per_elem));
}

void BM_Update(benchmark::State& state, Optimizer optimizer, WireFormat down) {
  const UpdateRule rule{.optimizer = optimizer, .groups = {0}, .down = down};
  const UpdateStep step{{{.lr = 1e-3, .momentum = 0.9, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8}}};
  Shard shard(rule);
  for (auto _ : state) {
    if (!shard.Step(step)) return state.SkipWithError("a chunk was not updated");
  }
  const uint64_t moments = MomentsOf(rule, step.groups[0]);
  Count(state, sizeof(float) * (1 + 2 + 2 * moments) + SizeOf(DTypeOf(down)));
}
BENCHMARK_CAPTURE(BM_Update, sgd_to_fp32, Optimizer::kSgd, WireFormat::kFloat32);
BENCHMARK_CAPTURE(BM_Update, adam_to_fp32, Optimizer::kAdam, WireFormat::kFloat32);
BENCHMARK_CAPTURE(BM_Update, adam_to_bf16, Optimizer::kAdam, WireFormat::kBFloat16);

void BM_Triad(benchmark::State& state) {
  std::vector<float> a(kChunks * kChunkElems);
  std::vector<float> b(a.size());
  for (auto _ : state) {
    for (size_t i = 0; i < a.size(); ++i) a[i] += 1e-3F * b[i];
    benchmark::ClobberMemory();
  }
  Count(state, 3 * sizeof(float));
}
BENCHMARK(BM_Triad);

}  // namespace
}  // namespace thalweg
