// These benchmarks fold and decode 1 MiB chunks, in pieces as a network delivers them and in one
// piece. Bytes are read + written, so that rates can be compared with the copy's.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "benchmark/benchmark.h"
#include "kernels/codec/dense.h"

namespace thalweg {
namespace {

constexpr size_t kChunkBytes = 1 << 20;

// Returns pieces of `piece_bytes`, the first shorter by `offset`: an odd offset makes an element
// straddle every boundary.
Payload Pieces(const std::vector<std::byte>& bytes, size_t piece_bytes, size_t offset) {
  Payload payload;
  size_t end = 0;
  for (size_t begin = 0; begin < bytes.size(); begin = end) {
    end = std::min(bytes.size(), begin + piece_bytes - (begin == 0 ? offset : 0));
    payload.pieces.emplace_back(bytes.data() + begin, end - begin);
  }
  return payload;
}

// The arguments are the number of contributions and the bytes of a piece.
void BM_FoldPayloads(benchmark::State& state, DType wire) {
  const auto count = static_cast<size_t>(state.range(0));
  const auto piece_bytes = static_cast<size_t>(state.range(1));
  const std::vector<std::vector<std::byte>> bytes(count, std::vector<std::byte>(kChunkBytes));
  std::vector<Payload> contributions;
  for (size_t k = 0; k < count; ++k) {
    contributions.push_back(Pieces(bytes[k], piece_bytes, 11 + 14 * k));
  }
  const std::vector<uint32_t> workers(count, 1);
  std::vector<std::byte> out(kChunkBytes);
  uint64_t nonfinite = 0;
  for (auto _ : state) {
    if (!FoldPayloads(contributions, workers, wire, kChunkBytes / SizeOf(wire), out.data(),
                      &nonfinite)
             .ok()) {
      state.SkipWithError("the fold failed");
    }
  }
  state.SetBytesProcessed(state.iterations() * static_cast<int64_t>((count + 1) * kChunkBytes));
}
BENCHMARK_CAPTURE(BM_FoldPayloads, fp32, DType::kFloat32)
    ->ArgsProduct({{2, 4}, {8 << 10, 64 << 10, 1 << 20}});
BENCHMARK_CAPTURE(BM_FoldPayloads, fp16, DType::kFloat16)
    ->ArgsProduct({{2, 4}, {8 << 10, 64 << 10, 1 << 20}});

void BM_DecodePayload(benchmark::State& state, DType wire) {
  const std::vector<std::byte> bytes(kChunkBytes);
  const Payload payload = Pieces(bytes, static_cast<size_t>(state.range(0)), 11);
  const size_t elems = kChunkBytes / SizeOf(wire);
  std::vector<std::byte> out(elems * sizeof(float));
  for (auto _ : state) {
    if (!DecodePayload(payload, wire, DType::kFloat32, elems, out.data()).ok()) {
      state.SkipWithError("the decoding failed");
    }
  }
  state.SetBytesProcessed(state.iterations() * static_cast<int64_t>(bytes.size() + out.size()));
}
BENCHMARK_CAPTURE(BM_DecodePayload, fp32, DType::kFloat32)
    ->Arg(8 << 10)
    ->Arg(64 << 10)
    ->Arg(1 << 20);
BENCHMARK_CAPTURE(BM_DecodePayload, fp16, DType::kFloat16)
    ->Arg(8 << 10)
    ->Arg(64 << 10)
    ->Arg(1 << 20);

void BM_Memcpy(benchmark::State& state) {
  const std::vector<std::byte> in(kChunkBytes);
  std::vector<std::byte> out(kChunkBytes);
  for (auto _ : state) {
    std::memcpy(out.data(), in.data(), in.size());
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * static_cast<int64_t>(2 * kChunkBytes));
}
BENCHMARK(BM_Memcpy);

}  // namespace
}  // namespace thalweg
