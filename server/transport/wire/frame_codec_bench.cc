// These benchmarks measure how long encoding and parsing the frame of a 512 KiB chunk takes; no
// payload byte is touched. The argument is the number of slices that hold the payload: one as when
// sent, slices of 64 KiB, slices of 8 KiB.
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "benchmark/benchmark.h"
#include "server/transport/wire/frame_codec.h"

namespace thalweg {
namespace {

constexpr size_t kPayloadBytes = 512 << 10;
const ChunkHeader kHeader{{{3, 1}, 2, 300}, 7, WireFormat::kFloat16, kPayloadBytes / 2, 8, 0};

Payload InSlices(size_t count) {
  auto bytes = std::make_shared<std::vector<std::byte>>(kPayloadBytes);
  Payload payload;
  payload.owner = bytes;
  for (size_t i = 0; i < count; ++i) {
    const size_t begin = kPayloadBytes * i / count;
    const size_t end = kPayloadBytes * (i + 1) / count;
    payload.pieces.push_back(std::span(*bytes).subspan(begin, end - begin));
  }
  return payload;
}

void BM_EncodeChunk(benchmark::State& state) {
  const Payload payload = InSlices(static_cast<size_t>(state.range(0)));
  for (auto _ : state) benchmark::DoNotOptimize(EncodeChunk(kHeader, payload));
}
BENCHMARK(BM_EncodeChunk)->Arg(1)->Arg(9)->Arg(65);

void BM_ParseFrame(benchmark::State& state) {
  const grpc::ByteBuffer frame =
      EncodeChunk(kHeader, InSlices(static_cast<size_t>(state.range(0))));
  for (auto _ : state) {
    // gRPC passes each frame in a buffer of its own. BM_CopyFrame measures that copy alone.
    benchmark::DoNotOptimize(ParseFrame(grpc::ByteBuffer(frame)));
  }
}
BENCHMARK(BM_ParseFrame)->Arg(1)->Arg(9)->Arg(65);

void BM_CopyFrame(benchmark::State& state) {
  const grpc::ByteBuffer frame =
      EncodeChunk(kHeader, InSlices(static_cast<size_t>(state.range(0))));
  for (auto _ : state) benchmark::DoNotOptimize(grpc::ByteBuffer(frame));
}
BENCHMARK(BM_CopyFrame)->Arg(1)->Arg(9)->Arg(65);

}  // namespace
}  // namespace thalweg
