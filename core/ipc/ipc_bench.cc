// These benchmarks measure the hand-over of a bucket between two threads: a message there and back,
// a chunk through an arena there and back, and a bucket filled chunk by chunk while a reader keeps
// pace, with a plain copy for comparison. Bytes are the bucket's.
#include <sys/socket.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "benchmark/benchmark.h"
#include "core/base/thread.h"
#include "core/ipc/bucket_arena.h"
#include "core/ipc/connection.h"

namespace thalweg {
namespace {

constexpr uint64_t kChunkBytes = 256 << 10;
constexpr uint32_t kChunks = 100;

TimePoint Soon() { return Now() + std::chrono::seconds(60); }

void BM_MessageRoundTrip(benchmark::State& state) {
  int fds[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) != 0) {
    state.SkipWithError("no sockets");
    return;
  }
  Connection here{UniqueFd(fds[0])};
  Connection there{UniqueFd(fds[1])};
  Thread echo("echo", [&there] {
    while (there.Receive(Soon()).ok()) there.Send(ipc::Submit{}).IgnoreError();
  });
  for (auto _ : state) {
    here.Send(ipc::Submit{}).IgnoreError();
    benchmark::DoNotOptimize(here.Receive(Soon()));
  }
  here.Shutdown();
}
BENCHMARK(BM_MessageRoundTrip)->UseRealTime();

void BM_ArenaRoundTrip(benchmark::State& state) {
  BucketArena ping = *BucketArena::Create("ping", 64, true);
  BucketArena pong = *BucketArena::Create("pong", 64, true);
  std::atomic<bool> stop{false};
  Thread echo("echo", [&] {
    for (uint32_t round = 1; !stop; ++round) {
      ping.WaitReady(round, Soon());
      pong.PublishReady(round);
    }
  });
  uint32_t round = 0;
  for (auto _ : state) {
    ping.PublishReady(++round);
    pong.WaitReady(round, Soon());
  }
  stop = true;
  ping.PublishReady(++round);
}
BENCHMARK(BM_ArenaRoundTrip)->UseRealTime();

void BM_FillArena(benchmark::State& state) {
  const std::vector<std::byte> gradient(kChunks * kChunkBytes);
  BucketArena arena = *BucketArena::Create("bench", gradient.size(), true);
  for (auto _ : state) {
    arena.ResetReady();
    Thread reader("reader", [&arena] {
      for (uint32_t chunk = 1; chunk <= kChunks; ++chunk) arena.WaitReady(chunk, Soon());
    });
    for (uint32_t chunk = 0; chunk < kChunks; ++chunk) {
      const uint64_t begin = chunk * kChunkBytes;
      std::memcpy(arena.payload() + begin, gradient.data() + begin, kChunkBytes);
      arena.PublishReady(chunk + 1);
    }
    reader.Join();
  }
  state.SetBytesProcessed(state.iterations() * static_cast<int64_t>(gradient.size()));
}
BENCHMARK(BM_FillArena)->UseRealTime();

void BM_Memcpy(benchmark::State& state) {
  const std::vector<std::byte> gradient(kChunks * kChunkBytes);
  std::vector<std::byte> copy(gradient.size());
  for (auto _ : state) {
    std::memcpy(copy.data(), gradient.data(), gradient.size());
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * static_cast<int64_t>(gradient.size()));
}
BENCHMARK(BM_Memcpy)->UseRealTime();

}  // namespace
}  // namespace thalweg
