// These tests restart a shard, or a node, in the middle of rounds, as a kill does: its connections
// break, and its memory is gone.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "core/base/protocol.h"
#include "core/base/testing/test_patience.h"
#include "core/base/thread.h"
#include "kernels/codec/lossy_reference.h"
#include "server/aggregator/aggregator.h"
#include "server/identity/job_key.h"
#include "server/shards/returning_shard.h"
#include "server/transport/node/remote_shard.h"
#include "server/transport/shard/shard_server.h"
#include "server/transport/testing/breaking_proxy.h"

namespace thalweg::restart_test {
namespace {

constexpr uint32_t kNodes = 3;
constexpr uint32_t kChunks = 5;
constexpr uint64_t kRounds = 40;

// The chunks are one bucket in float32, of which the last chunk is short, and buckets of their own
// in onebit.
constexpr uint64_t kFloats = 4500;
constexpr uint64_t kSigns = 300;

RoundId IdOf(WireFormat wire, uint32_t chunk, uint64_t round) {
  if (wire == WireFormat::kFloat32) return {{2, 1, 0}, chunk, round};
  return {{chunk, 1, 0}, 0, round};
}

uint64_t ElemsOf(WireFormat wire, const RoundId& id) {
  const uint64_t elems = wire == WireFormat::kFloat32 ? kFloats : kSigns;
  return ChunkPlan::For(elems, DType::kFloat32, wire, kMinChunkBytes, 1).Elems(id.chunk);
}

// A Program is what dies when an aggregator is killed.
struct Program {
  MetricRegistry metrics;
  Aggregator aggregator{{}, metrics};
  std::unique_ptr<ShardServer> server;
};

class Results : public MemberEvents {
 public:
  void OnResult(RoundResult result) override {
    Bytes bytes;
    for (const auto& piece : result.payload.pieces) {
      bytes.insert(bytes.end(), piece.begin(), piece.end());
    }
    MutexLock lock(mutex_);
    EXPECT_TRUE(of_.emplace(result.id, std::move(bytes)).second) << "a result came twice";
    EXPECT_EQ(result.workers, kNodes);
    changed_.NotifyAll();
  }
  void OnFailed(absl::Status why) override {
    MutexLock lock(mutex_);
    failure_ = std::move(why);
    changed_.NotifyAll();
  }
  // Waits for that many results; returns false when the job has failed instead.
  bool WaitFor(size_t count) {
    MutexLock lock(mutex_);
    changed_.WaitUntil(mutex_, Now() + kTestPatience, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return of_.size() >= count || !failure_.ok();
    });
    EXPECT_TRUE(failure_.ok()) << failure_;
    return of_.size() >= count;
  }
  bool WaitFor(RoundId id) {
    MutexLock lock(mutex_);
    return changed_.WaitUntil(mutex_, Now() + kTestPatience,
                              [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
                                return of_.contains(id) || !failure_.ok();
                              }) &&
           failure_.ok();
  }
  std::map<RoundId, Bytes> all() {
    MutexLock lock(mutex_);
    return of_;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  std::map<RoundId, Bytes> of_ ABSL_GUARDED_BY(mutex_);
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
};

class RestartTest : public ::testing::Test {
 protected:
  RestartTest() {
    StartProgram("127.0.0.1:0");
    const std::vector<std::string> parts = absl::StrSplit(address_, ':');
    uint32_t port = 0;
    EXPECT_TRUE(absl::SimpleAtoi(parts.back(), &port));
    port_ = static_cast<uint16_t>(port);
    proxy_ = std::make_unique<BreakingProxy>(port_);
  }

  void StartProgram(const std::string& listen) {
    program_ = std::make_unique<Program>();
    const TimePoint deadline = Now() + kTestPatience;
    while (program_->server == nullptr && Now() < deadline) {  // the kernel may need a moment
      auto server = ShardServer::Start({.listen = listen}, program_->aggregator, program_->metrics);
      if (server.ok()) program_->server = *std::move(server);
    }
    ASSERT_NE(program_->server, nullptr);
    address_ = program_->server->address();
  }

  // The nodes see no more than a connection that breaks.
  void KillAndRestart() {
    proxy_->SetOpen(false);
    proxy_->Break();
    program_->server->Stop(Duration::zero());
    StartProgram(address_);
    proxy_->SetOpen(true);
  }

  struct Chunk {
    Floats values;  // as the shard decodes them
    Bytes bytes;
  };
  static Chunk ChunkOf(uint32_t node, RoundId id, WireFormat wire, uint64_t elems) {
    std::mt19937_64 random(id.round * 1000 + id.bucket.index * 100 + id.chunk * 10 + node);
    Chunk chunk{Floats(elems), {}};
    for (float& value : chunk.values) value = static_cast<float>(random() % 20'001) / 7 - 1400;
    if (wire == WireFormat::kOneBit) {
      ReferenceChunk sent = ReferenceOneBit(chunk.values);
      return {std::move(sent.decoded), std::move(sent.bytes)};
    }
    chunk.bytes.resize(elems * sizeof(float));
    std::memcpy(chunk.bytes.data(), chunk.values.data(), chunk.bytes.size());
    return chunk;
  }

  // The job has a secret.
  JoinRequest RequestOf(uint32_t node) const {
    JoinRequest request;
    request.job = "job";
    request.node = node;
    request.node_name = "host";
    request.workers = 1;
    request.num_nodes = kNodes;
    request.world_size = kNodes;
    request.num_shards = 1;
    request.chunk_bytes = kMinChunkBytes;
    request.window_chunks = kChunks;
    request.round_timeout = kTestPatience;
    request.identity = key_->public_key();
    request.signer = key_;
    return request;
  }
  static BucketAnnouncement AnnouncementOf(WireFormat wire, uint32_t chunk) {
    const bool is_float = wire == WireFormat::kFloat32;
    const BucketLayout layout{DType::kFloat32,
                              {{"w", {static_cast<int64_t>(is_float ? kFloats : kSigns)}}}};
    return {IdOf(wire, chunk, 1).bucket, layout, wire};
  }
  static void Contribute(Member& member, uint32_t node, RoundId id, WireFormat wire) {
    const uint64_t elems = ElemsOf(wire, id);
    const auto bytes = std::make_shared<const Bytes>(ChunkOf(node, id, wire, elems).bytes);
    const absl::Status sent = member.Contribute(
        {id, member.terms().epoch, wire, elems, Payload(std::span(*bytes), bytes)});
    EXPECT_TRUE(sent.ok()) << sent;
  }

  // Takes a node through all rounds of all chunks, with up to two rounds' chunks on the way; one of
  // sinks_ hears it.
  void RunNode(uint32_t node, uint32_t sink, WireFormat wire) {
    const std::shared_ptr<Shard> remote =
        RemoteShard::Create(proxy_->address(), {.channels = 2, .grace = kTestPatience}, metrics_);
    ReturningShard shard(remote, kTestPatience, metrics_);
    const auto member = shard.Join(RequestOf(node), sinks_[sink], Now() + kTestPatience);
    ASSERT_TRUE(member.ok()) << member.status();
    for (uint32_t c = 0; c < kChunks; ++c) {
      ASSERT_TRUE((*member)->Register(AnnouncementOf(wire, c), Now() + kTestPatience).ok());
    }
    for (uint64_t round = 1; round <= kRounds; ++round) {
      AwaitRestartsBefore(round);
      for (uint32_t c = 0; c < kChunks; ++c) {
        if (round > 1 && !sinks_[sink]->WaitFor(IdOf(wire, c, round - 1))) return;
        Contribute(**member, node, IdOf(wire, c, round), wire);
      }
    }
    // A node that leaves cannot give the others what they lack after a restart.
    for (const auto& each : sinks_) each->WaitFor(kChunks * kRounds);
    (*member)->Leave(absl::OkStatus());
  }

  // A node goes no more than two rounds past one in which a restart is due, so that rounds remain
  // after the last restart.
  void AwaitRestartsBefore(uint64_t round) {
    if (round < 3) return;
    MutexLock lock(mutex_);
    const uint64_t due = (round - 3) * (restarts_ + 1) / kRounds;
    EXPECT_TRUE(changed_.WaitUntil(
        mutex_, Now() + kTestPatience,
        [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return restarts_done_ >= due; }));
  }

  // Runs the job; restarts the shard whenever a further part of the results has come.
  void RunJob(WireFormat wire, uint32_t restarts) {
    restarts_ = restarts;
    for (uint32_t node = 0; node < kNodes; ++node) sinks_.push_back(std::make_shared<Results>());
    std::vector<Thread> threads;
    for (uint32_t node = 0; node < kNodes; ++node) {
      threads.emplace_back("node", [this, node, wire] { RunNode(node, node, wire); });
    }
    for (uint32_t i = 1; i <= restarts; ++i) {
      if (!sinks_[i % kNodes]->WaitFor(kChunks * kRounds * i / (restarts + 1))) break;
      KillAndRestart();
      MutexLock lock(mutex_);
      restarts_done_ = i;
      changed_.NotifyAll();
    }
    threads.clear();
    for (const auto& sink : sinks_) {
      const auto results = sink->all();
      ASSERT_EQ(results.size(), kChunks * kRounds);
      EXPECT_TRUE(results == sinks_[0]->all());
    }
    const double returns = metrics_.GetCounter("thalweg_sidecar_shard_returns_total", "").Value();
    EXPECT_GE(returns, kNodes);
    EXPECT_LE(returns, kNodes * restarts);
  }

  // Compares float32 results with the means of what the nodes have contributed.
  static void CheckMeans(const std::map<RoundId, Bytes>& results) {
    for (const auto& [id, bytes] : results) {
      const Floats mean = MeanOf(id, WireFormat::kFloat32, ElemsOf(WireFormat::kFloat32, id));
      ASSERT_EQ(bytes.size(), mean.size() * sizeof(float));
      EXPECT_EQ(std::memcmp(bytes.data(), mean.data(), bytes.size()), 0)
          << "chunk " << id.chunk << " round " << id.round;
    }
  }
  static Floats MeanOf(RoundId id, WireFormat wire, uint64_t elems) {
    std::vector<Floats> values;
    for (uint32_t node = 0; node < kNodes; ++node) {
      values.push_back(ChunkOf(node, id, wire, elems).values);
    }
    return ReferenceMean(values, std::vector<uint32_t>(kNodes, 1));
  }

  const std::shared_ptr<const JobKey> key_ = JobKey::FromHex(std::string(64, '7')).value();
  MetricRegistry metrics_;
  std::unique_ptr<Program> program_;
  std::string address_;
  uint16_t port_ = 0;
  std::unique_ptr<BreakingProxy> proxy_;
  std::vector<std::shared_ptr<Results>> sinks_;
  uint32_t restarts_ = 0;  // that the job is to have

 private:
  Mutex mutex_;
  CondVar changed_;
  uint32_t restarts_done_ ABSL_GUARDED_BY(mutex_) = 0;
};

TEST_F(RestartTest, SumsAreThoseOfARunWithoutRestarts) {
  RunJob(WireFormat::kFloat32, 5);
  CheckMeans(sinks_[0]->all());
}

// A node whose process is killed in rounds. What its workers have of it outlives it: the inputs,
// and the results of the rounds before.
class RestartedNodeTest : public RestartTest {
 protected:
  static constexpr uint32_t kMortal = 1;
  static constexpr WireFormat kWire = WireFormat::kFloat32;

  // Lives from after round `completed` to the end of round `last`, or is killed in it.
  void Live(uint64_t completed, uint64_t last, bool is_killed) {
    BreakingProxy network(port_);
    const auto heard = std::make_shared<Results>();
    const std::shared_ptr<Shard> remote =
        RemoteShard::Create(network.address(), {.channels = 2, .grace = kTestPatience}, metrics_);
    ReturningShard shard(remote, kTestPatience, metrics_);
    const auto member = Begin(shard, completed, heard);
    ASSERT_TRUE(member.ok()) << member.status();
    terms_ = (*member)->terms();
    for (uint64_t round = completed + 1; round <= last; ++round) {
      const uint32_t chunks = is_killed && round == last ? kChunks / 2 : kChunks;
      for (uint32_t c = 0; c < chunks; ++c)
        Contribute(**member, kMortal, IdOf(kWire, c, round), kWire);
      for (uint32_t c = 0; c < chunks; ++c) ASSERT_TRUE(heard->WaitFor(IdOf(kWire, c, round)));
    }
    for (const auto& [id, bytes] : heard->all()) {
      const auto [known, is_new] = results_.emplace(id, bytes);
      EXPECT_TRUE(is_new || known->second == bytes) << "a node got two results of a round";
    }
    if (!is_killed) {
      for (const auto& sink : sinks_) sink->WaitFor(kChunks * kRounds);
      return (*member)->Leave(absl::OkStatus());
    }
    network.SetOpen(false);  // it cannot say that it leaves
    network.Break();
  }

  absl::StatusOr<std::unique_ptr<Member>> Begin(ReturningShard& shard, uint64_t completed,
                                                const std::shared_ptr<Results>& heard) {
    KeptSeat kept{terms_, {}, {}};
    for (uint32_t c = 0; c < kChunks; ++c) kept.buckets.push_back(AnnouncementOf(kWire, c));
    if (completed > 0) {
      for (uint32_t c = 0; c < kChunks; ++c) {
        kept.results.push_back(ResultOf(IdOf(kWire, c, completed)));
      }
      return shard.TakeUp(RequestOf(kMortal), std::move(kept), heard, Now() + kTestPatience);
    }
    auto member = shard.Join(RequestOf(kMortal), heard, Now() + kTestPatience);
    if (!member.ok()) return member;
    for (const BucketAnnouncement& bucket : kept.buckets) {
      EXPECT_TRUE((*member)->Register(bucket, Now() + kTestPatience).ok());
    }
    return member;
  }

  RoundResult ResultOf(RoundId id) {
    const auto bytes = std::make_shared<const Bytes>(results_.at(id));
    return {id, 1, kWire, ElemsOf(kWire, id), kNodes, 0, Payload(std::span(*bytes), bytes)};
  }

  Terms terms_;
  std::map<RoundId, Bytes> results_;  // that any of its lives has heard
};

TEST_F(RestartedNodeTest, SumsAreThoseOfARunWithoutRestarts) {
  for (uint32_t node = 0; node + 1 < kNodes; ++node) sinks_.push_back(std::make_shared<Results>());
  std::vector<Thread> threads;
  threads.emplace_back("node", [this] { RunNode(0, 0, kWire); });
  threads.emplace_back("node", [this] { RunNode(2, 1, kWire); });
  Live(0, 7, true);
  Live(6, 8, true);  // in the next round
  Live(7, 30, true);
  Live(29, kRounds, false);
  threads.clear();
  ASSERT_EQ(results_.size(), kChunks * kRounds);
  CheckMeans(results_);
  for (const auto& sink : sinks_) EXPECT_TRUE(sink->all() == results_);
  EXPECT_GE(metrics_.GetCounter("thalweg_sidecar_shard_returns_total", "").Value(), 2 * 3);
}

TEST_F(RestartTest, LossyResultsGoOnWithoutWhatTheShardHadLeftOut) {
  constexpr int kRestarts = 3;
  const WireFormat wire = WireFormat::kOneBit;
  RunJob(wire, kRestarts);
  std::map<uint32_t, Floats> residuals;
  std::map<uint32_t, int> lost;
  for (uint64_t round = 1; round <= kRounds; ++round) {
    for (uint32_t c = 0; c < kChunks; ++c) {
      const RoundId id = IdOf(wire, c, round);
      const uint64_t elems = ElemsOf(wire, id);
      const Floats mean = MeanOf(id, wire, elems);
      Floats& residual = residuals[c];
      if (residual.empty()) residual = Floats(elems);
      const Bytes bytes = sinks_[0]->all()[id];
      if (ReferenceOneBit(Sum(mean, residual)).bytes != bytes) {
        residual = Floats(elems);
        ++lost[c];
      }
      const Floats x = Sum(mean, residual);
      const ReferenceChunk sent = ReferenceOneBit(x);
      ASSERT_TRUE(sent.bytes == bytes) << "chunk " << c << " round " << round;
      residual = ResidualOf(x, sent.decoded, residual);
    }
  }
  for (uint32_t c = 0; c < kChunks; ++c) {
    EXPECT_GE(lost[c], 1);
    EXPECT_LE(lost[c], kRestarts);
  }
}

}  // namespace
}  // namespace thalweg::restart_test
