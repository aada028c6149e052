// These tests break the protocol: the peer's stream must end with the reason, its job must fail
// with the reason, and all other nodes must be served as before.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <memory>
#include <random>
#include <span>
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
#include "thalweg/v1/control.grpc.pb.h"
#include "thalweg/v1/exchange.pb.h"

namespace thalweg::hostile_client_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class HostileClientTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto server = ShardServer::Start({.listen = "127.0.0.1:0"}, shard_, metrics_);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    channel_ = grpc::CreateCustomChannel(server_->address(), grpc::InsecureChannelCredentials(),
                                         ClientArguments());
  }

  void TearDown() override { ExpectServing(); }

  // Checks that a correct node is still served.
  void ExpectServing() {
    RawStream stream(channel_);
    grpc::ByteBuffer answer;
    ASSERT_TRUE(stream.Write(EncodeOpen({Join()})));
    ASSERT_TRUE(stream.Write(EncodeChunk({}, {})));
    ASSERT_TRUE(stream.Read(&answer));
    EXPECT_TRUE(ParseFrame(std::move(answer)).ok());
  }

  // Joins as a new node, whose number is then node_, and returns its token.
  SessionToken Join() { return JoinedToken(channel_, ++node_); }

  // Sends a Heartbeat of this membership with this header, within `patience`.
  static grpc::Status Heartbeat(const std::shared_ptr<grpc::Channel>& channel, SessionToken token,
                                const std::string& header = "x",
                                Duration patience = kTestPatience) {
    grpc::ClientContext context;
    context.set_deadline(ToSystemTime(Now() + patience));
    context.AddMetadata("header", header);
    v1::HeartbeatRequest request;
    request.set_token(token);
    v1::HeartbeatResponse response;
    return v1::Control::NewStub(channel)->Heartbeat(&context, request, &response);
  }

  // Sends `frame` on an open stream; the job must fail and the stream end with `text`.
  void ExpectRefused(const grpc::ByteBuffer& frame, const std::string& text) {
    const size_t leaves_before = shard_.leaves.Get().size();
    RawStream stream(channel_);
    ASSERT_TRUE(stream.Write(EncodeOpen({Join()})));
    ASSERT_TRUE(stream.Write(frame));
    const grpc::Status status = stream.Finish();
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_THAT(status.error_message(), HasSubstr(text));
    const auto leaves = shard_.leaves.WaitFor(leaves_before + 1);
    ASSERT_GT(leaves.size(), leaves_before);
    EXPECT_EQ(leaves[leaves_before].first, node_);
    EXPECT_EQ(leaves[leaves_before].second.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(leaves[leaves_before].second.message()), HasSubstr(text));
  }

  MetricRegistry metrics_;
  RecordingShard shard_;
  std::unique_ptr<ShardServer> server_;
  std::shared_ptr<grpc::Channel> channel_;
  uint32_t node_ = 0;  // of the last Join
};

TEST_F(HostileClientTest, FirstFrameMustBeOpen) {
  for (const auto& frame :
       {EncodeChunk({}, {}), EncodeFailure(absl::AbortedError("x")), Buffer("\x0a"), Buffer("")}) {
    RawStream stream(channel_);
    ASSERT_TRUE(stream.Write(frame));
    EXPECT_EQ(stream.Finish().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  }
  EXPECT_TRUE(shard_.leaves.Get().empty());
}

TEST_F(HostileClientTest, MalformedFrameFailsTheJobWithTheReason) {
  ExpectRefused(Buffer("\x12\x7f"), "node sent a malformed frame");
  ExpectRefused(EncodeOpen({1}), "second open frame");
  ExpectRefused(EncodeFailure(absl::AbortedError("x")), "sent a failure or resumed frame");
}

TEST_F(HostileClientTest, JoinOfANodeThatResumesTheLargestJobIsHeard) {
  const auto remote = RemoteShard::Create(server_->address(), {}, metrics_);
  JoinRequest request = OfNode(++node_);
  // The rounds are those of one bucket, which counts as a chunk too. Such numbers are long ones on
  // the wire.
  const BucketRounds rounds{{1, 0},
                            std::vector<uint64_t>(kMaxResumedChunks - 1, uint64_t{1} << 62)};
  request.resume = {rounds};
  const auto member =
      remote->Join(request, std::make_shared<RecordingEvents>(), Now() + kTestPatience);
  ASSERT_TRUE(member.ok()) << member.status();
  EXPECT_EQ(shard_.joins.Get().back().first.resume, request.resume);
}

TEST_F(HostileClientTest, TooLongFrameIsRefused) {
  RawStream stream(channel_);
  ASSERT_TRUE(stream.Write(EncodeOpen({Join()})));
  ASSERT_NO_FATAL_FAILURE(AwaitOpened(stream, shard_));
  stream.Write(Buffer(std::string(kMaxFrameBytes + 1, 'x')));
  const grpc::Status status = stream.Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(), HasSubstr("larger than max"));
  EXPECT_EQ(shard_.leaves.WaitFor(1).front().second.code(), absl::StatusCode::kUnavailable);
}

TEST_F(HostileClientTest, RandomBytesNeverGetThrough) {
  std::mt19937 random(1);
  for (int i = 0; i < 200; ++i) {
    std::string bytes(random() % 50, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    RawStream stream(channel_);
    if (i % 2 == 0) stream.Write(EncodeOpen({Join()}));
    stream.Write(Buffer(bytes));
    EXPECT_NE(stream.Finish().error_code(), grpc::StatusCode::OK);
  }
  EXPECT_TRUE(shard_.contributions.Get().empty());
}

TEST_F(HostileClientTest, HalfClosedStreamWithoutLeaveCountsAsLost) {
  RawStream stream(channel_);
  ASSERT_TRUE(stream.Write(EncodeOpen({Join()})));
  ASSERT_TRUE(stream.WritesDone());
  EXPECT_TRUE(stream.Finish().ok());
  EXPECT_EQ(shard_.leaves.WaitFor(1).front().second.code(), absl::StatusCode::kUnavailable);
}

TEST_F(HostileClientTest, FailureFrameIsTheLastOneOfItsStream) {
  RawStream stream(channel_);
  ASSERT_TRUE(stream.Write(EncodeOpen({Join()})));
  ASSERT_NO_FATAL_FAILURE(AwaitOpened(stream, shard_));
  const auto node = shard_.nodes.Get().front();
  node->OnResult({});
  node->OnFailed(absl::AbortedError("node 1 is gone"));
  node->OnResult({});
  grpc::ByteBuffer frame;
  ASSERT_TRUE(stream.Read(&frame));
  ASSERT_TRUE(stream.Read(&frame));
  const auto parsed = ParseFrame(std::move(frame));
  ASSERT_TRUE(parsed.ok());
  EXPECT_EQ(std::get<FailureFrame>(*parsed).why, absl::AbortedError("node 1 is gone"));
  EXPECT_FALSE(stream.Read(&frame));
  EXPECT_TRUE(stream.Finish().ok());
}

TEST_F(HostileClientTest, StoppingServerTellsTheReason) {
  RawStream stream(channel_);
  ASSERT_TRUE(stream.Write(EncodeOpen({Join()})));
  ASSERT_NO_FATAL_FAILURE(AwaitOpened(stream, shard_));
  grpc::Status status;
  {
    Thread reading("read", [&] { status = stream.Finish(); });
    server_->Stop(kTestPatience);
  }
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(status.error_message(), AllOf(HasSubstr(server_->address()), HasSubstr("stopping")));
  SetUp();
}

TEST_F(HostileClientTest, OlderAndNewerWireVersionsAreRefusedAtJoin) {
  const auto stub = v1::Control::NewStub(channel_);
  for (const auto& [least, most] :
       {std::pair{1u, kWireVersion - 1}, {kWireVersion + 1, kWireVersion + 2}}) {
    grpc::ClientContext context;
    context.set_deadline(ToSystemTime(Now() + kTestPatience));
    v1::JoinRequest request;
    request.set_min_wire_version(least);
    request.set_max_wire_version(most);
    v1::JoinResponse response;
    const grpc::Status status = stub->Join(&context, request, &response);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_THAT(status.error_message(),
                AllOf(HasSubstr(absl::StrCat("versions ", least, " to ", most)),
                      HasSubstr(absl::StrCat("speaks ", kWireVersion))));
  }
  EXPECT_TRUE(shard_.joins.Get().empty());
}

TEST_F(HostileClientTest, NodeThatGivesUpJoiningStopsWaitingAtOnce) {
  shard_.hold_joins = true;
  grpc::ClientContext context;
  context.set_deadline(ToSystemTime(Now() + kTestPatience));
  v1::JoinResponse response;
  grpc::Status status;
  {
    Thread joining("join", [&] {
      status = v1::Control::NewStub(channel_)->Join(&context, ProtoOfNode(7), &response);
    });
    EXPECT_EQ(shard_.joins.WaitFor(1).size(), 1u);
    context.TryCancel();
  }
  EXPECT_EQ(status.error_code(), grpc::StatusCode::CANCELLED);
  const auto given_up = shard_.given_up.WaitFor(1);
  ASSERT_EQ(given_up.size(), 1u);
  EXPECT_EQ(given_up.front().first, 7u);
  EXPECT_EQ(given_up.front().second.code(), absl::StatusCode::kUnavailable);
  shard_.AnswerJoins();
}

TEST_F(HostileClientTest, ProbeIsAnsweredUpToItsBoundAndRefusedBeyond) {
  const auto probe = [this](const std::string& request) {
    grpc::ClientContext context;
    context.set_deadline(ToSystemTime(Now() + kTestPatience));
    grpc::CompletionQueue cq;
    auto call = grpc::GenericStub(channel_).PrepareUnaryCall(&context, "/thalweg.v1.Control/Probe",
                                                             Buffer(request), &cq);
    grpc::ByteBuffer response;
    grpc::Status status;
    call->StartCall();
    call->Finish(&response, &status, this);
    void* tag;
    bool ok;
    EXPECT_EQ(cq.AsyncNext(&tag, &ok, ToSystemTime(Now() + kTestPatience)),
              grpc::CompletionQueue::GOT_EVENT);
    return status;
  };
  EXPECT_TRUE(probe("").ok());
  EXPECT_EQ(probe("no protobuf at all").error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  v1::ProbeRequest padded;
  padded.mutable_padding()->resize(4 << 20);
  EXPECT_TRUE(probe(padded.SerializeAsString()).ok());
  padded.mutable_padding()->push_back('x');
  const grpc::Status refused = probe(padded.SerializeAsString());
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(refused.error_message(), HasSubstr("4194305 bytes, expected at most 4194304"));
}

TEST_F(HostileClientTest, CompressedMessagesAreRefused) {
  const auto channel = ForeignChannel(server_->address());
  for (const auto algorithm : {GRPC_COMPRESS_DEFLATE, GRPC_COMPRESS_GZIP}) {
    RawStream stream(channel, algorithm);
    stream.Write(EncodeOpen({Join()}));
    EXPECT_EQ(stream.Finish().error_code(), grpc::StatusCode::UNIMPLEMENTED);

    grpc::ClientContext context;
    context.set_deadline(ToSystemTime(Now() + kTestPatience));
    context.set_compression_algorithm(algorithm);
    v1::ProbeRequest request;
    request.mutable_padding()->resize(4 << 20);
    v1::ProbeResponse response;
    const grpc::Status refused = v1::Control::NewStub(channel)->Probe(&context, request, &response);
    EXPECT_EQ(refused.error_code(), grpc::StatusCode::UNIMPLEMENTED);
    EXPECT_THAT(refused.error_message(), HasSubstr("is disabled"));
  }
  EXPECT_TRUE(shard_.leaves.Get().empty());  // the shard has not heard of the streams
}

TEST_F(HostileClientTest, LongHeadersAreRefused) {
  const SessionToken token = Join();
  const auto foreign = ForeignChannel(server_->address());
  EXPECT_TRUE(Heartbeat(channel_, token, std::string(2000, 'x')).ok());
  EXPECT_EQ(Heartbeat(foreign, token, std::string(5000, 'x')).error_code(),
            grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(shard_.heartbeats.Get().size(), 1u);
}

TEST_F(HostileClientTest, ConnectionHasABoundedNumberOfStreams) {
  const SessionToken token = Join();
  const auto crowded = ForeignChannel(server_->address());
  std::vector<std::unique_ptr<RawStream>> streams;
  for (int i = 0; i < kMaxStreamsOfConnection; ++i) {
    streams.push_back(std::make_unique<RawStream>(crowded));
  }
  // A gRPC client waits for a place and does not get one, however long it waits.
  EXPECT_EQ(Heartbeat(crowded, token, "x", std::chrono::milliseconds(100)).error_code(),
            grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_TRUE(Heartbeat(channel_, token).ok());
  streams.pop_back();
  EXPECT_TRUE(Heartbeat(crowded, token).ok());
}

// All callers are at one address, which may have half of the places.
TEST_F(HostileClientTest, JoinsThatWaitAreBoundedAndOtherCallsAreAnswered) {
  auto server =
      ShardServer::Start({.listen = "127.0.0.1:0", .max_waiting_joins = 4}, shard_, metrics_);
  ASSERT_TRUE(server.ok()) << server.status();
  const auto channel = ForeignChannel((*server)->address());
  const auto join = [&channel](uint32_t node) {
    SessionToken token = 0;
    return RawJoin(channel, ProtoOfNode(node), &token);
  };
  // A place is free a little after the caller that had it has its answer.
  const auto join_when_free = [&join](uint32_t node) {
    const TimePoint deadline = Now() + kTestPatience;
    grpc::Status status;
    do {
      status = join(node);
    } while (status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED && Now() < deadline);
    return status;
  };
  const SessionToken member = JoinedToken(channel, 3);
  shard_.hold_joins = true;
  grpc::Status first;
  grpc::Status second;
  {
    Thread a("join", [&] { first = join_when_free(0); });
    Thread b("join", [&] { second = join_when_free(1); });
    EXPECT_EQ(shard_.joins.WaitFor(3).size(), 3u);
    const grpc::Status third = join(2);
    EXPECT_EQ(third.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
    EXPECT_THAT(third.error_message(), HasSubstr("too many of this address, wait"));
    EXPECT_TRUE(Heartbeat(channel, member).ok());
    shard_.AnswerJoins();
  }
  EXPECT_TRUE(first.ok()) << first.error_message();
  EXPECT_TRUE(second.ok()) << second.error_message();
  EXPECT_TRUE(join_when_free(2).ok());
}

TEST_F(HostileClientTest, WhatHasArrivedAndIsHeldIsBounded) {
  constexpr size_t kMemory = 64 << 20;
  constexpr size_t kPayload = 7 << 20;
  constexpr size_t kSenders = 30;
  auto server =
      ShardServer::Start({.listen = "127.0.0.1:0", .memory_bytes = kMemory}, shard_, metrics_);
  ASSERT_TRUE(server.ok()) << server.status();
  const auto buffer = std::make_shared<std::vector<std::byte>>(kPayload);
  const Payload payload(std::span<const std::byte>(*buffer), buffer);
  ChunkHeader header;
  header.elems = kPayload / sizeof(float);
  std::vector<SessionToken> tokens;
  const auto joining = ForeignChannel((*server)->address());
  for (uint32_t node = 0; node < kSenders; ++node) tokens.push_back(JoinedToken(joining, node));
  std::vector<std::unique_ptr<RawStream>> streams;
  // The shard keeps what it gets.
  for (const SessionToken token : tokens) {
    streams.push_back(std::make_unique<RawStream>(ForeignChannel((*server)->address())));
    grpc::ByteBuffer answer;
    RawStream& stream = *streams.back();
    if (!stream.Write(EncodeOpen({token})) || !stream.Write(EncodeChunk(header, payload)) ||
        !stream.Read(&answer)) {
      break;
    }
  }
  EXPECT_GT(streams.size(), kMemory / kPayload / 2);
  EXPECT_LT(streams.size(), kSenders);
  // gRPC resets streams while others are read on, so that somewhat more may arrive.
  EXPECT_LE(shard_.contributions.Get().size() * kPayload, 2 * kMemory);
}

}  // namespace
}  // namespace thalweg::hostile_client_test
