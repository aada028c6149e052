// For tests of a job's parts: its first Hello, its workers' ends of their connections, and buckets.
#pragma once

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "core/base/protocol.h"
#include "core/base/testing/test_patience.h"
#include "core/ipc/bucket_arena.h"
#include "core/ipc/connection.h"
#include "server/shards/shard_group.h"
#include "server/shards/testing/fake_shard.h"
#include "server/sidecar/bucket/bucket_table.h"
#include "server/sidecar/device/cpu_device.h"

namespace thalweg {

// Ranks are 5 + local rank, so that messages cannot confuse the two.
inline ipc::Hello HelloOf(uint32_t local_rank, uint32_t local_size, const char* codec = "fp32") {
  ipc::Hello hello;
  hello.ipc_version = kIpcVersion;
  hello.job = "job";
  hello.rank = 5 + local_rank;
  hello.world_size = 2 * local_size;
  hello.node = 1;
  hello.num_nodes = 2;
  hello.node_name = "host1";
  hello.local_rank = local_rank;
  hello.local_size = local_size;
  hello.codec = *CodecPolicy::Parse(codec);
  hello.timeout_ms = 10'000;
  hello.step_timeout_ms = 100'000;
  return hello;
}

// The two ends of a worker's connection.
struct WorkerEnds {
  std::shared_ptr<Connection> sidecar;
  std::unique_ptr<Connection> worker;
};
inline WorkerEnds Connect() {
  int fds[2];
  EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
  return {std::make_shared<Connection>(UniqueFd(fds[0])),
          std::make_unique<Connection>(UniqueFd(fds[1]))};
}

inline BucketTerms TermsOf(const ipc::Hello& hello, Device& device) {
  BucketTerms terms;
  terms.codec = hello.codec;
  terms.chunk_bytes = kMinChunkBytes;  // 1024 float32
  terms.num_nodes = hello.num_nodes;
  terms.local_size = hello.local_size;
  terms.device = &device;
  terms.patience = kTestPatience;
  return terms;
}

// A bucket of `elems` float32 that all workers have announced, with their arenas.
struct TestBucket {
  std::shared_ptr<NodeBucket> bucket;
  std::vector<BucketArena> inputs;  // by local rank

  // All workers have put `value` into all elements.
  void Fill(float value) {
    const uint32_t chunks = bucket->whole().part().plan.Count();
    for (BucketArena& input : inputs) {
      input.ResetReady();
      auto* values = reinterpret_cast<float*>(input.payload());
      for (uint64_t i = 0; i < bucket->layout().Elems(); ++i) values[i] = value;
      input.PublishReady(chunks);
    }
  }
};
inline TestBucket Announce(BucketTable& table, uint32_t index, int64_t elems, uint32_t local_size,
                           const std::optional<UpdateRule>& update = {}) {
  TestBucket made;
  const BucketLayout layout{DType::kFloat32, {{"w" + std::to_string(index), {elems}}}};
  for (uint32_t rank = 0; rank < local_size; ++rank) {
    made.inputs.push_back(*BucketArena::Create("input", static_cast<uint64_t>(elems) * 4, true));
    const auto bucket =
        table.Announce(rank, "rank " + std::to_string(5 + rank), {{index, 0}, layout, {}, update},
                       UniqueFd(dup(made.inputs.back().fd())));
    EXPECT_TRUE(bucket.ok()) << bucket.status();
    made.bucket = *bucket;
  }
  return made;
}

// A fixture with the table of a job's buckets, which is open from SetUp on, and what it needs.
class BucketsFixture : public ::testing::Test {
 protected:
  // With a shard, SetUp joins it.
  explicit BucketsFixture(const ipc::Hello& hello, bool with_shard = false)
      : hello_(hello), with_shard_(with_shard) {}

  void SetUp() override {
    const auto sink = [](uint32_t) { return std::make_shared<NullSink>(); };
    if (with_shard_) ASSERT_TRUE(shards_.Join({}, sink, Now() + kTestPatience).ok());
    table_.Open(TermsOf(hello_, device_));
  }

  ipc::Hello hello_;
  const bool with_shard_;
  CpuDevice device_;
  MetricRegistry registry_;
  SidecarMetrics metrics_{registry_};
  FakeShard shard_;
  ShardGroup shards_{with_shard_ ? std::vector<Shard*>{&shard_} : std::vector<Shard*>(), registry_};
  JobCompression compression_{"job", hello_.codec, 2, 1, metrics_};
  CodecStates states_;
  BucketTable table_{states_, compression_, shards_};
};

}  // namespace thalweg
