// These tests check, over real sockets and with a real shard, how many results are kept for a node
// whose connections may break.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/base/protocol.h"
#include "server/aggregator/aggregator.h"
#include "server/transport/channel_options.h"
#include "server/transport/node/remote_shard.h"
#include "server/transport/received_frames.h"
#include "server/transport/shard/shard_server.h"
#include "server/transport/testing/raw_join.h"
#include "server/transport/testing/raw_stream.h"
#include "server/transport/testing/recorder.h"
#include "server/transport/wire/control_codec.h"
#include "server/transport/wire/frame_codec.h"

namespace thalweg::kept_results_test {
namespace {

using ::testing::HasSubstr;

constexpr uint32_t kWindow = 4;
constexpr uint32_t kStreams = 4;
constexpr uint32_t kChunks = kStreams * kWindow;
constexpr uint64_t kChunkElems = kMinChunkBytes / sizeof(float);

// A bucket of kChunks chunks.
BucketAnnouncement Bucket() {
  BucketAnnouncement bucket;
  bucket.layout = {DType::kFloat32, {{"w", {static_cast<int64_t>(kChunks * kChunkElems)}}}};
  return bucket;
}

class KeptResultsTest : public ::testing::Test {
 protected:
  KeptResultsTest() {
    auto server = ShardServer::Start({.listen = "127.0.0.1:0"}, aggregator_, metrics_);
    EXPECT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    request_.job = "job";
    request_.workers = 1;
    request_.num_nodes = 1;
    request_.world_size = 1;
    request_.num_shards = 1;
    request_.chunk_bytes = kMinChunkBytes;
    request_.window_chunks = kWindow;
    request_.round_timeout = kTestPatience;
  }

  static Payload Chunk() {
    static const auto bytes = std::make_shared<const std::string>(kMinChunkBytes, '\0');
    return {std::as_bytes(std::span(*bytes)), bytes};
  }

  MetricRegistry metrics_;
  Aggregator aggregator_{{}, metrics_};
  std::unique_ptr<ShardServer> server_;
  JoinRequest request_;
};

TEST_F(KeptResultsTest, NodeThatReadsAndAcknowledgesNothingIsRefusedAtItsWindow) {
  const auto channel = ForeignChannel(server_->address());
  SessionToken token = 0;
  ASSERT_TRUE(RawJoin(channel, ToProto(request_), &token).ok());
  grpc::ClientContext context;
  v1::RegisterBucketResponse response;
  ASSERT_TRUE(v1::Control::NewStub(channel)
                  ->RegisterBucket(&context, ToProto(token, Bucket()), &response)
                  .ok());
  RawStream stream(channel);
  ASSERT_TRUE(stream.Write(EncodeOpen({.token = token, .incarnation = 1})));
  for (uint64_t round = 1; round <= kWindow; ++round) {
    const ChunkHeader header{{{}, 0, round}, 1, WireFormat::kFloat32, kChunkElems};
    ASSERT_TRUE(stream.Write(EncodeChunk(header, Chunk())));
    grpc::ByteBuffer answer;
    ASSERT_TRUE(stream.Read(&answer)) << round;
  }
  const ChunkHeader header{{{}, 0, kWindow + 1}, 1, WireFormat::kFloat32, kChunkElems};
  ASSERT_TRUE(stream.Write(EncodeChunk(header, Chunk())));
  grpc::ByteBuffer answer;
  ASSERT_TRUE(stream.Read(&answer));
  const auto failure = ParseFrame(std::move(answer));
  ASSERT_TRUE(failure.ok() && std::holds_alternative<FailureFrame>(*failure));
  EXPECT_THAT(std::string(std::get<FailureFrame>(*failure).why.message()),
              HasSubstr("has acknowledged none of the last 4 results"));
}

// What a stream has brought is acknowledged only by what is sent on the same stream.
TEST_F(KeptResultsTest, NodeThatUsesOneOfItsStreamsAtATimeGoesOn) {
  const auto remote = RemoteShard::Create(server_->address(),
                                          {.channels = kStreams, .grace = kTestPatience}, metrics_);
  const auto events = std::make_shared<RecordingEvents>();
  const auto member = remote->Join(request_, events, Now() + kTestPatience);
  ASSERT_TRUE(member.ok()) << member.status();
  ASSERT_TRUE((*member)->Register(Bucket(), Now() + kTestPatience).ok());
  size_t results = 0;
  for (uint64_t round = 1; round <= 10; ++round) {
    for (uint32_t stream = 0; stream < kStreams; ++stream) {
      for (uint32_t chunk = stream; chunk < kChunks; chunk += kStreams) {
        const absl::Status sent = (*member)->Contribute(
            {{{}, chunk, round}, 1, WireFormat::kFloat32, kChunkElems, Chunk()});
        ASSERT_TRUE(sent.ok()) << sent;
      }
      results += kWindow;
      ASSERT_EQ(events->results.WaitFor(results).size(), results);
    }
  }
  EXPECT_TRUE(events->failures.Get().empty());
  EXPECT_GE(metrics_.GetGauge("thalweg_shard_memory_reserved_bytes", "").Value(),
            (1 + kStreams) * kWindow * kMinChunkBytes);
}

// Letters have no results with which acknowledgements could go.
TEST_F(KeptResultsTest, LettersThatNothingAnswersAreReleasedBySenderAndShard) {
  constexpr size_t kBytes = 256 << 10;
  constexpr size_t kLetters = 3 * 2 * kLetterBytesPerNode / kBytes;
  request_.num_nodes = request_.world_size = 2;
  request_.chunk_bytes = kBytes;
  const RemoteShard::Options options{.channels = 2, .grace = kTestPatience};
  std::vector<std::unique_ptr<RemoteShard>> remotes;
  std::vector<std::shared_ptr<RecordingEvents>> events;
  std::vector<std::future<absl::StatusOr<std::unique_ptr<Member>>>> joining;
  for (uint32_t node = 0; node < 2; ++node) {
    remotes.push_back(RemoteShard::Create(server_->address(), options, metrics_));
    events.push_back(std::make_shared<RecordingEvents>());
    joining.push_back(
        std::async(std::launch::async, [&remote = *remotes[node], to = events[node], node, this] {
          JoinRequest request = request_;
          request.node = node;
          return remote.Join(request, to, Now() + kTestPatience);
        }));
  }
  auto sender = joining[0].get();
  auto receiver = joining[1].get();
  ASSERT_TRUE(sender.ok() && receiver.ok()) << sender.status() << receiver.status();
  std::vector<std::weak_ptr<const std::string>> kept;
  for (uint64_t number = 1; number <= kLetters; ++number) {
    auto bytes = std::make_shared<const std::string>(kBytes, 'x');
    kept.push_back(bytes);
    Contribution letter{{LettersOf(0), static_cast<uint32_t>(number % 2), number},
                        (*sender)->terms().epoch,
                        WireFormat::kDenseUInt8,
                        kBytes,
                        {std::as_bytes(std::span(*bytes)), bytes}};
    letter.collective = {Place::One(0), Place::One(1), Fold::kNone};
    bytes = nullptr;
    ASSERT_TRUE((*sender)->Contribute(std::move(letter)).ok()) << number;
    ASSERT_EQ(events[1]->results.WaitFor(number).size(), number) << number;
  }
  const auto held = [&] {
    return std::count_if(kept.begin(), kept.end(),
                         [](const auto& each) { return !each.expired(); });
  };
  const TimePoint deadline = Now() + kTestPatience;
  while (held() > static_cast<int64_t>(kUntoldBytes / kBytes) && Now() < deadline) {
    std::this_thread::yield();
  }
  EXPECT_LE(held(), kUntoldBytes / kBytes);
}

}  // namespace
}  // namespace thalweg::kept_results_test
