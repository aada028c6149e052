// These tests use peers that do not read, peers that do not stop sending, and many peers at once:
// memory must stay bounded, and the other peers must be served.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/thread.h"
#include "server/transport/channel_options.h"
#include "server/transport/node/remote_shard.h"
#include "server/transport/shard/shard_server.h"
#include "server/transport/testing/raw_join.h"
#include "server/transport/testing/raw_stream.h"
#include "server/transport/testing/recording_shard.h"
#include "server/transport/wire/frame_codec.h"

namespace thalweg::load_test {
namespace {

using ::testing::HasSubstr;

constexpr size_t kChunkBytes = 512 << 10;
// gRPC and the kernel may buffer this many chunks of a stream that is not read: flow control
// windows grow to 4 MiB, socket buffers to a few.
constexpr uint32_t kChunksOnTheWay = 32;

class LoadTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto server = ShardServer::Start({.listen = "127.0.0.1:0"}, shard_, metrics_);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }

  // Returns a stream of node 0, which the shard has taken.
  std::unique_ptr<RawStream> Opened() {
    const auto channel = grpc::CreateCustomChannel(
        server_->address(), grpc::InsecureChannelCredentials(), ClientArguments());
    const SessionToken token = JoinedToken(channel, 0);
    auto stream = std::make_unique<RawStream>(channel);
    EXPECT_TRUE(stream->Write(EncodeOpen({token})));
    AwaitOpened(*stream, shard_);
    return stream;
  }

  Payload OneChunk() const { return {std::as_bytes(std::span(*data_)), data_}; }

  MetricRegistry metrics_;
  RecordingShard shard_;
  std::unique_ptr<ShardServer> server_;
  const std::shared_ptr<const std::string> data_ = std::make_shared<std::string>(kChunkBytes, 'x');
};

TEST_F(LoadTest, BacklogIsWhatANodeDoesNotReadAndFallsWhenItReads) {
  constexpr uint32_t kResults = 4 * kChunksOnTheWay;
  const auto stream = Opened();
  const auto nodes = shard_.nodes.Get();
  ASSERT_EQ(nodes.size(), 1u);
  ServedNode& node = *nodes.front();
  EXPECT_EQ(node.Backlog(), 0u);
  for (uint32_t i = 0; i < kResults; ++i) {
    node.OnResult(ResultOf(i, OneChunk()));
    EXPECT_LE(node.Backlog(), i);  // gRPC holds the first
  }
  EXPECT_GE(node.Backlog(), kResults - kChunksOnTheWay);
  for (uint32_t i = 0; i < kResults; ++i) {
    grpc::ByteBuffer frame;
    ASSERT_TRUE(stream->Read(&frame));
    EXPECT_LE(node.Backlog(), kResults - 1 - i);
  }
  EXPECT_EQ(node.Backlog(), 0u);
}

TEST_F(LoadTest, NodeThatSendsWithoutEndAndReadsNothingIsRefusedAtItsWindow) {
  constexpr uint32_t kWindow = 8;
  constexpr uint32_t kFarTooMany = 1000;
  shard_.window_chunks = kWindow;
  const auto stream = Opened();
  uint32_t sent = 0;
  const auto chunk = [this](uint32_t number) {
    const ChunkHeader header{{{}, number, 1}, 5, WireFormat::kFloat32, kChunkBytes / 4};
    return EncodeChunk(header, OneChunk());
  };
  {
    Thread writing("write", [&] {
      while (sent < kFarTooMany && stream->Write(chunk(sent))) ++sent;
    });
    const auto leaves = shard_.leaves.WaitFor(1);
    ASSERT_EQ(leaves.size(), 1u);
    EXPECT_THAT(std::string(leaves.front().second.message()), HasSubstr("than its window"));
    // Queued results are not kept for a node that does not read.
    EXPECT_EQ(shard_.nodes.Get().front()->Backlog(), 0u);
    stream->Cancel();
  }
  EXPECT_LT(sent, kWindow + 3 * kChunksOnTheWay);  // in flight to the shard and back
  EXPECT_LE(shard_.contributions.Get().size(), kWindow + kChunksOnTheWay + 1);
}

TEST_F(LoadTest, NodeThatReadsNothingDoesNotDelayAnother) {
  const auto idle = Opened();
  const auto node = shard_.nodes.Get().front();
  for (uint32_t i = 0; i < 2 * kChunksOnTheWay; ++i) {
    node->OnResult(ResultOf(i, OneChunk()));
  }
  EXPECT_GT(node->Backlog(), 0u);
  const auto remote = RemoteShard::Create(server_->address(), {}, metrics_);
  const auto events = std::make_shared<RecordingEvents>();
  const auto member = remote->Join(OfNode(1), events, Now() + kTestPatience);
  ASSERT_TRUE(member.ok()) << member.status();
  for (uint32_t c = 0; c < 20; ++c) {
    const Contribution chunk{{{}, c, 1}, 5, WireFormat::kFloat32, kChunkBytes / 4, OneChunk()};
    ASSERT_TRUE((*member)->Contribute(chunk).ok());
  }
  EXPECT_EQ(events->results.WaitFor(20).size(), 20u);
}

// Runs one node in a job of its own: it joins, gets its chunks back unchanged, and leaves.
void ExchangeAFewChunks(RemoteShard& shard, uint32_t node) {
  constexpr uint32_t kChunks = 12;
  const auto events = std::make_shared<RecordingEvents>();
  const auto member = shard.Join(OfNode(node), events, Now() + kTestPatience);
  ASSERT_TRUE(member.ok()) << member.status();
  for (uint32_t c = 0; c < kChunks; ++c) {
    const auto data = std::make_shared<std::string>(absl::StrCat("node ", node, " chunk ", c, " "));
    data->resize(40000, static_cast<char>(node));
    const Payload payload(std::as_bytes(std::span(*data)), data);
    const Contribution chunk{{{}, c, 1}, 5, WireFormat::kFloat32, data->size() / 4, payload};
    ASSERT_TRUE((*member)->Contribute(chunk).ok());
  }
  const auto results = events->results.WaitFor(kChunks);
  ASSERT_EQ(results.size(), kChunks);
  for (const RoundResult& result : results) {
    const std::string bytes = BytesOf(result.payload);
    EXPECT_EQ(bytes.size(), 40000u);
    EXPECT_THAT(
        bytes, ::testing::StartsWith(absl::StrCat("node ", node, " chunk ", result.id.chunk, " ")));
  }
  EXPECT_TRUE(events->failures.Get().empty());
}

TEST_F(LoadTest, SixtyFourNodesAtOnceAllGetTheirResults) {
  constexpr uint32_t kNodes = 64;
  {
    std::vector<Thread> threads;
    for (uint32_t node = 0; node < kNodes; ++node) {
      threads.emplace_back("node", [this, node] {
        const auto shard =
            RemoteShard::Create(server_->address(), {.channels = 1 + node % 3}, metrics_);
        ExchangeAFewChunks(*shard, node);
      });
    }
  }
  EXPECT_EQ(shard_.contributions.Get().size(), kNodes * 12u);
  EXPECT_EQ(shard_.leaves.WaitFor(kNodes).size(), kNodes);
  server_->Stop(Duration::zero());
  // Each node leaves, and not once more at the end of its streams. On a busy machine it may have no
  // time to say so.
  std::set<uint32_t> left;
  uint32_t said = 0;
  for (const auto& [node, reason] : shard_.leaves.Get()) {
    EXPECT_TRUE(left.insert(node).second) << node;
    EXPECT_TRUE(reason.ok() || absl::IsUnavailable(reason)) << reason;
    said += reason.ok() ? 1 : 0;
  }
  EXPECT_EQ(left.size(), kNodes);
  EXPECT_GE(said, kNodes / 2);
}

}  // namespace
}  // namespace thalweg::load_test
