// These tests cover several streams of one node on the aggregator's side.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>

#include "server/transport/channel_options.h"
#include "server/transport/shard/shard_server.h"
#include "server/transport/testing/raw_join.h"
#include "server/transport/testing/raw_stream.h"
#include "server/transport/testing/recording_shard.h"
#include "server/transport/wire/frame_codec.h"

namespace thalweg::server_streams_test {
namespace {

using ::testing::HasSubstr;

class ServerStreamsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto server = ShardServer::Start({.listen = "127.0.0.1:0"}, shard_, metrics_);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    token_ = JoinedToken(NewChannel(), 0);
  }

  // Returns a connection of its own.
  std::shared_ptr<grpc::Channel> NewChannel() {
    return grpc::CreateCustomChannel(server_->address(), grpc::InsecureChannelCredentials(),
                                     ClientArguments());
  }
  std::unique_ptr<RawStream> Opened(const OpenFrame& open) {
    auto opened = std::make_unique<RawStream>(NewChannel());
    EXPECT_TRUE(opened->Write(EncodeOpen(open)));
    return opened;
  }
  std::unique_ptr<RawStream> Opened(uint32_t stream, uint32_t num_streams) {
    return Opened({token(), stream, num_streams});
  }

  static grpc::ByteBuffer Chunk(uint32_t chunk) { return EncodeChunk({{{}, chunk, 1}}, {}); }

  // Sends a chunk that the shard echoes; afterwards both ends know each other.
  static void ExpectEcho(RawStream& stream, uint32_t chunk) {
    ASSERT_TRUE(stream.Write(Chunk(chunk)));
    grpc::ByteBuffer answer;
    ASSERT_TRUE(stream.Read(&answer));
    const auto parsed = ParseFrame(std::move(answer));
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    ASSERT_TRUE(std::holds_alternative<ChunkFrame>(*parsed));
    EXPECT_EQ(std::get<ChunkFrame>(*parsed).header.id.chunk, chunk);
  }

  void ExpectRefused(uint32_t stream, uint32_t num_streams, grpc::StatusCode code,
                     const std::string& text) {
    ExpectRefused({token(), stream, num_streams}, code, text);
  }
  void ExpectRefused(const OpenFrame& open, grpc::StatusCode code, const std::string& text) {
    const grpc::Status status = Opened(open)->Finish();
    EXPECT_EQ(status.error_code(), code) << status.error_message();
    EXPECT_THAT(status.error_message(), HasSubstr(text));
  }

  SessionToken token() const { return token_; }

  MetricRegistry metrics_;
  RecordingShard shard_;
  std::unique_ptr<ShardServer> server_;
  SessionToken token_ = 0;  // of node 0
};

TEST_F(ServerStreamsTest, StreamsOfANodeAreOneMemberAndResultsTakeTheChunksStream) {
  const auto first = Opened(0, 3);
  const auto second = Opened(1, 3);
  const auto third = Opened(2, 3);
  for (uint32_t round = 0; round < 4; ++round) {
    ExpectEcho(*first, 3 * round);
    ExpectEcho(*second, 3 * round + 1);
    ExpectEcho(*third, 3 * round + 2);
  }
  EXPECT_TRUE(shard_.leaves.Get().empty());
}

TEST_F(ServerStreamsTest, StreamsMayOpenInAnyOrder) {
  const auto last = Opened(1, 2);
  ExpectEcho(*last, 7);
  const auto first = Opened(0, 2);
  ExpectEcho(*first, 8);
}

TEST_F(ServerStreamsTest, UnfittingOpenEndsItsOwnStreamOnly) {
  const auto first = Opened(0, 2);
  ExpectEcho(*first, 0);
  const auto kInvalid = grpc::StatusCode::INVALID_ARGUMENT;
  ExpectRefused(1, 3, kInvalid, "stream 1 of 3, expected one of 2 as it said before");
  ExpectRefused(0, 2, grpc::StatusCode::ALREADY_EXISTS, "stream 0 of 2 open already");
  ExpectRefused(0, 0, kInvalid, "stream 0 of 0, expected 1 to 16 streams");
  ExpectRefused(2, 2, kInvalid, "stream 2 of 2, expected 1 to 16 streams");
  ExpectRefused(0, 17, kInvalid, "stream 0 of 17, expected 1 to 16 streams");
  const auto second = Opened(1, 2);
  ExpectEcho(*second, 1);
  ExpectEcho(*first, 2);
  EXPECT_TRUE(shard_.leaves.Get().empty());
}

TEST_F(ServerStreamsTest, ChunkOnAForeignStreamEndsTheNodeWithTheReason) {
  const auto first = Opened(0, 2);
  ExpectEcho(*first, 0);
  const auto second = Opened(1, 2);
  ExpectEcho(*second, 1);
  ASSERT_TRUE(first->Write(Chunk(3)));
  for (const auto& stream : {first.get(), second.get()}) {
    const grpc::Status status = stream->Finish();
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_THAT(status.error_message(),
                HasSubstr("chunk 3 on stream 0 of 2, expected it on stream 1"));
  }
  const auto leaves = shard_.leaves.WaitFor(1);
  ASSERT_EQ(leaves.size(), 1u);
  EXPECT_EQ(leaves.front().second.code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(ServerStreamsTest, LostStreamMakesTheNodeLeaveOnceAndEndsTheOthers) {
  const auto first = Opened(0, 2);
  ExpectEcho(*first, 0);
  const auto second = Opened(1, 2);
  ExpectEcho(*second, 1);
  second->Cancel();
  const grpc::Status status = first->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(status.error_message(), HasSubstr("stream 1 of the node has ended"));
  server_->Stop(kTestPatience);
  const auto leaves = shard_.leaves.Get();
  ASSERT_EQ(leaves.size(), 1u);
  EXPECT_EQ(leaves.front().second, absl::UnavailableError("lost its connection to the shard"));
}

TEST_F(ServerStreamsTest, StreamThatIsOpenedAgainGetsWhatItHasNotReceived) {
  const auto first = Opened({.token = token(), .incarnation = 1});
  for (uint32_t chunk = 0; chunk < 3; ++chunk) ExpectEcho(*first, chunk);
  // The node has got one of three results.
  const auto second = Opened({.token = token(), .incarnation = 2, .received = 1});
  grpc::ByteBuffer frame;
  ASSERT_TRUE(second->Read(&frame));
  auto parsed = ParseFrame(std::move(frame));
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  ASSERT_TRUE(std::holds_alternative<ResumedFrame>(*parsed));
  EXPECT_EQ(std::get<ResumedFrame>(*parsed).received, 3u);
  for (uint32_t chunk = 1; chunk < 3; ++chunk) {
    ASSERT_TRUE(second->Read(&frame));
    parsed = ParseFrame(std::move(frame));
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    EXPECT_EQ(std::get<ChunkFrame>(*parsed).header.id.chunk, chunk);
  }
  ExpectEcho(*second, 3);
  EXPECT_EQ(first->Finish().error_code(), grpc::StatusCode::ABORTED);
  EXPECT_EQ(shard_.contributions.Get().size(), 4u);
  EXPECT_TRUE(shard_.leaves.Get().empty());
}

TEST_F(ServerStreamsTest, OlderAndEqualIncarnationsAreRefused) {
  const auto latest = Opened({.token = token(), .incarnation = 3});
  grpc::ByteBuffer resumed;
  ASSERT_TRUE(latest->Read(&resumed));
  ExpectEcho(*latest, 0);
  for (const uint32_t incarnation : {0u, 2u, 3u}) {
    const auto late = Opened({.token = token(), .incarnation = incarnation});
    EXPECT_EQ(late->Finish().error_code(), grpc::StatusCode::ALREADY_EXISTS);
  }
  ExpectEcho(*latest, 1);
}

TEST_F(ServerStreamsTest, ResultsThatWereNeverSentCannotBeAcknowledged) {
  const auto stream = Opened({.token = token(), .incarnation = 1});
  ExpectEcho(*stream, 0);
  ExpectRefused({.token = token(), .incarnation = 2, .received = 2},
                grpc::StatusCode::INVALID_ARGUMENT, "acknowledges 2 frames, expected 1 at most");
  ASSERT_TRUE(stream->Write(EncodeChunk({.id = {{}, 1, 1}, .acknowledged = 9}, {})));
  EXPECT_THAT(stream->Finish().error_message(),
              HasSubstr("acknowledges 9 frames, expected 1 at most"));
  EXPECT_EQ(shard_.leaves.WaitFor(1).size(), 1u);
}

TEST_F(ServerStreamsTest, ResultsThatAreKeptAreCountedByStreamAndLettersAreNot) {
  const OpenFrame open{.token = token(), .num_streams = 2, .incarnation = 1};
  const auto first = Opened(open);
  ExpectEcho(*first, 0);
  auto second_open = open;
  second_open.stream = 1;
  const auto second = Opened(second_open);
  for (uint32_t chunk = 1; chunk < 10; chunk += 2) ExpectEcho(*second, chunk);
  const auto node = shard_.nodes.Get().front();
  RoundResult letter = ResultOf(1, {});
  letter.id.bucket = LettersOf(1);
  node->OnResult(letter);
  EXPECT_EQ(node->KeptResults(0).streams, 2u);
  EXPECT_EQ(node->KeptResults(0).results, 1u);
  EXPECT_EQ(node->KeptResults(7).results, 5u);
  ASSERT_TRUE(second->Write(EncodeChunk({.id = {{}, 1, 1}, .acknowledged = 4}, {})));
  shard_.contributions.WaitFor(7);
  EXPECT_LE(node->KeptResults(1).results, 2u);  // the fifth, and the answer to this one
}

TEST_F(ServerStreamsTest, NodeWhoseStreamsHaveEndedIsForgotten) {
  {
    const auto first = Opened(0, 2);
    ExpectEcho(*first, 0);
    ASSERT_TRUE(first->WritesDone());
    EXPECT_TRUE(first->Finish().ok());
  }
  ExpectRefused(0, 2, grpc::StatusCode::NOT_FOUND, "no such membership");
  EXPECT_EQ(shard_.leaves.Get().size(), 1u);
  // The node gets another token, and may open another number of streams than before.
  const SessionToken before = std::exchange(token_, JoinedToken(NewChannel(), 0));
  EXPECT_NE(token(), before);
  const auto again = Opened(0, 1);
  ExpectEcho(*again, 1);
}

TEST_F(ServerStreamsTest, FailureIsToldOnEveryStreamAlsoOnOneThatComesLate) {
  const auto first = Opened(0, 3);
  ExpectEcho(*first, 0);
  const auto second = Opened(1, 3);
  ExpectEcho(*second, 1);
  const auto node = shard_.nodes.Get().front();
  // This is more than flow control lets pass unread, so the first stream cannot end yet.
  const auto large = std::make_shared<std::string>(8 << 20, 'x');
  for (uint32_t i = 0; i < 8; ++i) {
    node->OnResult(ResultOf(3 * i, Payload(std::as_bytes(std::span(*large)), large)));
  }
  const absl::Status why = absl::AbortedError("node 1 is gone");
  node->OnFailed(why);
  EXPECT_EQ(node->Backlog(), 0u);  // results have been dropped
  const auto late = Opened(2, 3);
  for (const auto& stream : {late.get(), second.get(), first.get()}) {
    grpc::ByteBuffer frame;
    absl::StatusOr<ParsedFrame> parsed;
    do {
      ASSERT_TRUE(stream->Read(&frame));
      parsed = ParseFrame(std::move(frame));
      ASSERT_TRUE(parsed.ok());
    } while (std::holds_alternative<ChunkFrame>(*parsed));
    ASSERT_TRUE(std::holds_alternative<FailureFrame>(*parsed));
    EXPECT_EQ(std::get<FailureFrame>(*parsed).why, why);
    EXPECT_TRUE(stream->Finish().ok());
  }
}

TEST_F(ServerStreamsTest, UnknownTokenEndsEveryStreamWithoutLeaving) {
  for (uint32_t i = 0; i < 2; ++i) {
    ExpectRefused({token() + 1, i, 2}, grpc::StatusCode::NOT_FOUND,
                  "no such membership: it has ended, or the shard has been restarted");
    ExpectRefused({0, i, 2}, grpc::StatusCode::NOT_FOUND, "no such membership");
  }
  EXPECT_TRUE(shard_.leaves.Get().empty());
}

TEST_F(ServerStreamsTest, ResultsBeforeTheFirstStreamAreDropped) {
  shard_.nodes.Get().front()->OnResult(ResultOf(7, {}));
  const auto stream = Opened(0, 1);
  ExpectEcho(*stream, 0);
}

TEST_F(ServerStreamsTest, FailureBeforeTheFirstStreamIsToldOnIt) {
  const absl::Status why = absl::AbortedError("node 1 is gone");
  shard_.nodes.Get().front()->OnFailed(why);
  const auto stream = Opened(0, 1);
  grpc::ByteBuffer frame;
  ASSERT_TRUE(stream->Read(&frame));
  const auto parsed = ParseFrame(std::move(frame));
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  ASSERT_TRUE(std::holds_alternative<FailureFrame>(*parsed));
  EXPECT_EQ(std::get<FailureFrame>(*parsed).why, why);
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(ServerStreamsTest, StoppingServerTellsTheSameReasonOnEveryStream) {
  const auto first = Opened(0, 2);
  ExpectEcho(*first, 0);
  const auto second = Opened(1, 2);
  ExpectEcho(*second, 1);
  server_->Stop(kTestPatience);
  for (const auto& stream : {first.get(), second.get()}) {
    const grpc::Status status = stream->Finish();
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
    EXPECT_THAT(status.error_message(), HasSubstr("is stopping"));
  }
  EXPECT_EQ(shard_.leaves.Get().size(), 1u);
}

}  // namespace
}  // namespace thalweg::server_streams_test
