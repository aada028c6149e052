// These tests connect RemoteShard and ShardServer over real sockets.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "core/base/thread.h"
#include "server/transport/channel_options.h"
#include "server/transport/node/remote_shard.h"
#include "server/transport/shard/shard_server.h"
#include "server/transport/testing/known_member.h"
#include "server/transport/testing/recording_shard.h"

namespace thalweg::loopback_test {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;

std::string Message(const absl::Status& status) { return std::string(status.message()); }
TimePoint Soon() { return Now() + kTestPatience; }

JoinRequest ToShard(uint32_t shard) {
  JoinRequest request;
  request.shard = shard;
  return request;
}

class LoopbackTest : public ::testing::Test {
 protected:
  void SetUp() override {
    StartServer("127.0.0.1:0");
    remote_ = RemoteShard::Create(server_->address(), {}, metrics_);
  }

  void StartServer(const std::string& listen) {
    auto server = ShardServer::Start({.listen = listen}, shard_, metrics_);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }

  void Join() {
    auto member = remote_->Join(ToShard(3), events_, Soon());
    ASSERT_TRUE(member.ok()) << member.status();
    member_ = *std::move(member);
  }
  // Joins, and exchanges a chunk, so that both ends know the stream.
  void JoinAndExchange() {
    ASSERT_NO_FATAL_FAILURE(Join());
    const size_t count = events_->results.Get().size() + 1;
    ASSERT_TRUE(Contribute(0, std::make_shared<std::string>("ab")).ok());
    ASSERT_EQ(events_->results.WaitFor(count).size(), count);
  }

  // Contributes `bytes` as chunk number `chunk`.
  absl::Status Contribute(uint32_t chunk, const std::shared_ptr<const std::string>& bytes) {
    return member_->Contribute({{{7, 1}, chunk, 9},
                                5,
                                WireFormat::kBFloat16,
                                bytes->size() / 2,
                                Payload(std::as_bytes(std::span(*bytes)), bytes)});
  }

  double Metric(const std::string& direction, const std::string& role) {
    return metrics_
        .GetCounter("thalweg_grpc_" + direction + "_payload_bytes_total", "", {{"role", role}})
        .Value();
  }

  MetricRegistry metrics_;
  RecordingShard shard_;
  const std::shared_ptr<RecordingEvents> events_ = std::make_shared<RecordingEvents>();
  std::unique_ptr<ShardServer> server_;
  std::unique_ptr<RemoteShard> remote_;
  std::unique_ptr<Member> member_;
};

TEST_F(LoopbackTest, JoinCarriesEveryField) {
  const TimePoint begin = Now();
  const TimePoint deadline = begin + seconds(20);
  const auto member = remote_->Join({.node = 2,
                                     .node_name = "host-2:77",
                                     .workers = 4,
                                     .job = "bert",
                                     .num_nodes = 3,
                                     .world_size = 12,
                                     .shard = 1,
                                     .num_shards = 2,
                                     .chunk_bytes = 1 << 19,
                                     .window_chunks = 48,
                                     .codec = {{.wire = DType::kFloat16}, {}},
                                     .round_timeout = milliseconds(24500),
                                     .link = {1.5e8, microseconds(250)}},
                                    events_, deadline);
  ASSERT_TRUE(member.ok()) << member.status();
  const Terms& terms = (*member)->terms();
  EXPECT_EQ(terms.epoch, 5u);
  EXPECT_EQ(terms.chunk_bytes, 1u << 18);
  EXPECT_EQ(terms.weight, 3u);
  EXPECT_EQ(terms.window_chunks, 64u);
  const auto [request, shard_deadline] = shard_.joins.WaitFor(1).front();
  EXPECT_EQ(request.node, 2u);
  EXPECT_EQ(request.node_name, "host-2:77");
  EXPECT_EQ(request.workers, 4u);
  EXPECT_EQ(request.job, "bert");
  EXPECT_EQ(request.num_nodes, 3u);
  EXPECT_EQ(request.world_size, 12u);
  EXPECT_EQ(request.shard, 1u);
  EXPECT_EQ(request.num_shards, 2u);
  EXPECT_EQ(request.chunk_bytes, 1u << 19);
  EXPECT_EQ(request.window_chunks, 48u);
  EXPECT_EQ(request.link.bytes_per_second, 1.5e8);
  EXPECT_EQ(request.link.round_trip, microseconds(250));
  EXPECT_EQ(request.codec.fallback.wire, DType::kFloat16);
  EXPECT_EQ(request.round_timeout, milliseconds(24500));
  // The shard gives up before the caller does, so that its reason still arrives.
  // It counts from the arrival.
  EXPECT_LT(shard_deadline - (Now() - begin), deadline);
  EXPECT_GT(shard_deadline, deadline - seconds(3));
}

TEST_F(LoopbackTest, ShardsErrorsKeepCodeAndReason) {
  ASSERT_NO_FATAL_FAILURE(Join());
  shard_.register_answer = absl::InvalidArgumentError("tensor 'w' differs");
  const absl::Status bucket = member_->Register({}, Soon());
  EXPECT_EQ(bucket.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(Message(bucket), HasSubstr("tensor 'w' differs"));
  shard_.join_answer = absl::DeadlineExceededError("job 'bert': node 1 did not join");
  const absl::Status join = remote_->Join(ToShard(3), events_, Soon()).status();
  EXPECT_EQ(join.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(Message(join),
            "aggregator shard 3 at " + server_->address() + ": job 'bert': node 1 did not join");
}

TEST_F(LoopbackTest, ErrorsOfAJobNameItsOwnNumberOfAShardThatOthersNumberDifferently) {
  ASSERT_NO_FATAL_FAILURE(Join());
  const auto other = remote_->Join(ToShard(1), std::make_shared<RecordingEvents>(), Soon());
  ASSERT_TRUE(other.ok()) << other.status();
  shard_.register_answer = absl::InvalidArgumentError("tensor 'w' differs");
  const std::string rest = " at " + server_->address() + ": tensor 'w' differs";
  EXPECT_EQ(Message(member_->Register({}, Soon())), "aggregator shard 3" + rest);
  EXPECT_EQ(Message((*other)->Register({}, Soon())), "aggregator shard 1" + rest);
}

TEST_F(LoopbackTest, ControlCallsArrive) {
  ASSERT_NO_FATAL_FAILURE(Join());
  const BucketLayout layout{DType::kFloat64, {{"w", {3, 4}}, {"b", {4}}}};
  EXPECT_TRUE(
      member_->Register({{4, 2}, layout, WireFormat::kFloat64, 0x123456789abcdef0u, 4096}, Soon())
          .ok());
  const auto [id, announced, wire, placement, raw_bytes, update] =
      shard_.buckets.WaitFor(1).front();
  EXPECT_EQ(id, (BucketId{4, 2}));
  EXPECT_EQ(announced, layout);
  EXPECT_EQ(placement, 0x123456789abcdef0u);
  EXPECT_EQ(raw_bytes, 4096u);
  EXPECT_EQ(update, std::nullopt);
  const auto pulse = member_->Heartbeat(Soon());
  ASSERT_TRUE(pulse.ok()) << pulse.status();
  EXPECT_EQ(pulse->clock.clock, "a boot");
  EXPECT_EQ(pulse->clock.nanos, -5);
  EXPECT_EQ(pulse->lost, (std::vector<LostNode>{{"node 7 (far)", "its cable"}}));
  EXPECT_EQ(shard_.heartbeats.Get(), std::vector<uint32_t>{0});
  member_->Leave(absl::AbortedError("loss is NaN"));
  const auto [node, reason] = shard_.leaves.WaitFor(1).front();
  EXPECT_EQ(node, 0u);
  EXPECT_EQ(reason, absl::AbortedError("loss is NaN"));
}

TEST_F(LoopbackTest, ChunkFieldsArriveBothWays) {
  ASSERT_NO_FATAL_FAILURE(Join());
  ASSERT_TRUE(Contribute(11, std::make_shared<std::string>("sixbytesyes!")).ok());
  const Contribution up = shard_.contributions.WaitFor(1).front();
  EXPECT_EQ(up.id, (RoundId{{7, 1}, 11, 9}));
  EXPECT_EQ(up.epoch, 5u);
  EXPECT_EQ(up.wire, WireFormat::kBFloat16);
  EXPECT_EQ(up.elems, 6u);
  EXPECT_EQ(BytesOf(up.payload), "sixbytesyes!");
  const RoundResult down = events_->results.WaitFor(1).front();
  EXPECT_EQ(down.id, up.id);
  EXPECT_EQ(down.epoch, 5u);
  EXPECT_EQ(down.wire, WireFormat::kBFloat16);
  EXPECT_EQ(down.elems, 6u);
  EXPECT_EQ(down.workers, 8u);
  EXPECT_EQ(down.nonfinite_elems, 2u);
  EXPECT_EQ(BytesOf(down.payload), "sixbytesyes!");
  EXPECT_EQ(Metric("sent", "client"), 12);
  EXPECT_EQ(Metric("received", "server"), 12);
  EXPECT_EQ(Metric("sent", "server"), 12);
  EXPECT_EQ(Metric("received", "client"), 12);
}

TEST_F(LoopbackTest, OneShotContributionOfAGroupArrivesWithAllThatTheRoundDoes) {
  ASSERT_NO_FATAL_FAILURE(Join());
  const auto bytes = std::make_shared<std::string>("from node four!!");
  ASSERT_TRUE(member_
                  ->Contribute({.id = {OneShotsOf(3), 2, 17},
                                .epoch = 5,
                                .wire = WireFormat::kFloat64,
                                .elems = 2,
                                .payload = Payload(std::as_bytes(std::span(*bytes)), bytes),
                                .group = 3,
                                .collective = {Place::One(4), Place::All(), Fold::kNone},
                                .timeout = microseconds(1'500'250),
                                .settled = 16})
                  .ok());
  const Contribution up = shard_.contributions.WaitFor(1).front();
  EXPECT_TRUE(IsOneShot(up.id));
  EXPECT_EQ(up.id, (RoundId{OneShotsOf(3), 2, 17}));
  EXPECT_EQ(up.epoch, 5u);
  EXPECT_EQ(up.wire, WireFormat::kFloat64);
  EXPECT_EQ(up.elems, 2u);
  EXPECT_EQ(BytesOf(up.payload), *bytes);
  EXPECT_EQ(up.group, 3u);
  EXPECT_EQ(up.collective, (Collective{Place::One(4), Place::All(), Fold::kNone}));
  EXPECT_EQ(up.timeout, milliseconds(1501));
  EXPECT_EQ(up.settled, 16u);
  EXPECT_EQ(events_->results.WaitFor(1).front().id, up.id);
}

TEST_F(LoopbackTest, ReadinessAndReceiptArriveAsEmptyPayloads) {
  ASSERT_NO_FATAL_FAILURE(Join());
  for (const WireFormat wire : {WireFormat::kFloat32, WireFormat::kTopK}) {
    ASSERT_TRUE(member_
                    ->Contribute({.id = {OneShotsOf(0), 0, 1},
                                  .epoch = 5,
                                  .wire = wire,
                                  .elems = 1000,
                                  .payload = {},
                                  .collective = {Place::One(1), Place::One(1), Fold::kNone}})
                    .ok());
  }
  const auto ready = shard_.contributions.WaitFor(2);
  const auto receipts = events_->results.WaitFor(2);
  ASSERT_EQ(ready.size(), 2u);
  ASSERT_EQ(receipts.size(), 2u);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(ready[i].elems, 1000u);
    EXPECT_EQ(ready[i].payload.SizeBytes(), 0u);
    EXPECT_EQ(receipts[i].elems, 1000u);
    EXPECT_EQ(receipts[i].wire, ready[i].wire);
    EXPECT_EQ(receipts[i].payload.SizeBytes(), 0u);
  }
  EXPECT_TRUE(events_->failures.Get().empty());
}

TEST_F(LoopbackTest, WhatIsSuppliedArrivesAsAResultWhateverItsWorkers) {
  ASSERT_NO_FATAL_FAILURE(Join());
  for (const uint32_t workers : {0u, 8u}) {
    ASSERT_TRUE(
        member_->Supply({{{7, 1}, 11, 9}, 5, WireFormat::kFloat32, 0, workers, 2, {}}).ok());
  }
  const auto supplied = shard_.supplied.WaitFor(2);
  ASSERT_EQ(supplied.size(), 2u);
  EXPECT_EQ(supplied[0].workers, 0u);
  EXPECT_EQ(supplied[1].workers, 8u);
  for (const RoundResult& result : supplied) {
    EXPECT_EQ(result.id, (RoundId{{7, 1}, 11, 9}));
    EXPECT_EQ(result.epoch, 5u);
    EXPECT_EQ(result.nonfinite_elems, 2u);
  }
  EXPECT_TRUE(shard_.contributions.Get().empty());
}

TEST_F(LoopbackTest, ManyMegabytesArriveUnchangedAndInOrder) {
  constexpr uint32_t kChunks = 128;
  constexpr size_t kChunkBytes = 512 << 10;
  // All chunks lie in one buffer, each at another odd offset.
  auto data = std::make_shared<std::string>(kChunkBytes + 7 * kChunks, '\0');
  uint64_t state = 1;
  for (char& byte : *data)
    byte = static_cast<char>((state = state * 6364136223846793005u + 1) >> 56);
  ASSERT_NO_FATAL_FAILURE(Join());
  const auto window = [&](uint32_t c) { return std::span(*data).subspan(7 * c, kChunkBytes); };
  for (uint32_t c = 0; c < kChunks; ++c) {
    const Payload payload(std::as_bytes(window(c)), data);
    const Contribution chunk{{{0, 0}, c, 1}, 5, WireFormat::kFloat32, kChunkBytes / 4, payload};
    ASSERT_TRUE(member_->Contribute(chunk).ok());
  }
  const auto results = events_->results.WaitFor(kChunks);
  ASSERT_EQ(results.size(), kChunks);
  for (uint32_t c = 0; c < kChunks; ++c) {
    ASSERT_EQ(results[c].id.chunk, c);
    const std::string bytes = BytesOf(results[c].payload);
    ASSERT_EQ(bytes.size(), kChunkBytes);
    ASSERT_EQ(std::memcmp(bytes.data(), window(c).data(), kChunkBytes), 0) << "chunk " << c;
  }
  EXPECT_TRUE(events_->failures.Get().empty());
}

TEST_F(LoopbackTest, OrderlyLeaveIsToldFirstAndMakesNoFailure) {
  ASSERT_NO_FATAL_FAILURE(JoinAndExchange());
  member_->Leave(absl::OkStatus());
  const auto leaves = shard_.leaves.WaitFor(1);
  EXPECT_EQ(leaves.front().first, 0u);
  EXPECT_TRUE(leaves.front().second.ok());
  EXPECT_EQ(Contribute(0, std::make_shared<std::string>("ab")).code(),
            absl::StatusCode::kFailedPrecondition);
  member_.reset();
  server_->Stop(seconds(5));
  EXPECT_EQ(shard_.leaves.Get().size(), 1u);
  EXPECT_TRUE(events_->failures.Get().empty());
}

TEST_F(LoopbackTest, MemberThatIsDestroyedLeavesInGoodOrder) {
  ASSERT_NO_FATAL_FAILURE(JoinAndExchange());
  member_.reset();
  const auto leaves = shard_.leaves.WaitFor(1);
  ASSERT_EQ(leaves.size(), 1u);
  EXPECT_TRUE(leaves.front().second.ok());
  EXPECT_TRUE(events_->failures.Get().empty());
}

TEST_F(LoopbackTest, CallsAfterLeaveDoNotReachTheShard) {
  ASSERT_NO_FATAL_FAILURE(Join());
  member_->Leave(absl::OkStatus());
  const auto code = absl::StatusCode::kFailedPrecondition;
  EXPECT_EQ(member_->Register({}, Soon()).code(), code);
  EXPECT_EQ(member_->Heartbeat(Soon()).status().code(), code);
  EXPECT_EQ(member_->ReadResidual({}, 0, Soon()).status().code(), code);
  EXPECT_EQ(member_->WriteResidual({}, 0, {}, Soon()).code(), code);
  EXPECT_EQ(member_->SetSettings(1, {}, Soon()).code(), code);
  EXPECT_EQ(member_->ReadWeights({}, 0, 0, Soon()).status().code(), code);
  EXPECT_EQ(member_->WriteWeights({}, 0, 0, {}, Soon()).code(), code);
  EXPECT_EQ(member_->Snapshots({}, Soon()).status().code(), code);
  EXPECT_EQ(member_->Supply({}).code(), code);
  EXPECT_TRUE(shard_.buckets.Get().empty());
  EXPECT_TRUE(shard_.heartbeats.Get().empty());
}

TEST_F(LoopbackTest, SettingsAndWeightsArriveBothWaysBitForBit) {
  ASSERT_NO_FATAL_FAILURE(Join());
  const UpdateStep step{{GroupStep{.lr = 0.1, .weight_decay = 1e-300},
                         GroupStep{.lr = 3, .beta1 = 0.9, .beta2 = 1 - 1e-16, .eps = 1e-8}}};
  ASSERT_TRUE(member_->SetSettings(~uint64_t{0}, step, Soon()).ok());
  EXPECT_EQ(shard_.settings.WaitFor(1).front(), std::pair(~uint64_t{0}, step));
  const WeightsSlice slice{{1, -0.0f, 1e-45f, std::nanf("")}, uint64_t{1} << 60};
  ASSERT_TRUE(member_->WriteWeights({3, 1, 0}, 7, 2, slice, Soon()).ok());
  const auto [chunk, number, written] = shard_.weights.WaitFor(1).front();
  EXPECT_EQ(chunk, 7u);
  EXPECT_EQ(number, 2u);
  const auto read = member_->ReadWeights({3, 1, 0}, 7, 2, Soon());
  ASSERT_TRUE(read.ok()) << read.status();
  for (const WeightsSlice& got : {written, *read}) {
    EXPECT_EQ(got.steps, slice.steps);
    ASSERT_EQ(got.values.size(), slice.values.size());
    EXPECT_EQ(std::memcmp(got.values.data(), slice.values.data(), 4 * sizeof(float)), 0);
  }
}

TEST_F(LoopbackTest, FailedJobIsToldOnceWithItsReason) {
  ASSERT_NO_FATAL_FAILURE(JoinAndExchange());
  const absl::Status why =
      absl::DeadlineExceededError("job 'a': bucket 3, round 9: node 1 is late");
  shard_.nodes.Get().front()->OnFailed(why);
  EXPECT_EQ(events_->failures.WaitFor(1).front(), why);
  EXPECT_EQ(Contribute(0, std::make_shared<std::string>("ab")), why);
  member_.reset();
  EXPECT_EQ(events_->failures.Get().size(), 1u);
}

TEST_F(LoopbackTest, ResultsAfterTheFailureAreDropped) {
  ASSERT_NO_FATAL_FAILURE(JoinAndExchange());
  const auto node = shard_.nodes.Get().front();
  node->OnFailed(absl::AbortedError("over"));
  node->OnResult({});
  EXPECT_EQ(events_->failures.WaitFor(1).size(), 1u);
  server_->Stop(seconds(5));
  EXPECT_EQ(events_->results.Get().size(), 1u);
}

TEST_F(LoopbackTest, UnknownMembershipIsNotFoundOnStreamsAndCalls) {
  const auto channel = grpc::CreateCustomChannel(
      server_->address(), grpc::InsecureChannelCredentials(), ClientArguments());
  KnownMember stranger(channel, {.token = 1}, {}, events_, metrics_);
  Member& member = stranger.member();
  for (const absl::Status& why :
       {events_->failures.WaitFor(1).front(), member.Register({}, Soon()),
        member.Heartbeat(Soon()).status(), member.ReadResidual({}, 0, Soon()).status(),
        member.WriteResidual({}, 0, {}, Soon())}) {
    EXPECT_EQ(why.code(), absl::StatusCode::kNotFound);
    EXPECT_THAT(Message(why), AllOf(HasSubstr("the shard"), HasSubstr("no such membership")));
  }
  member.Leave(absl::OkStatus());
  EXPECT_TRUE(shard_.leaves.Get().empty());
}

TEST_F(LoopbackTest, TooLongContributionIsRefusedBeforeItIsSent) {
  ASSERT_NO_FATAL_FAILURE(Join());
  const absl::Status status = Contribute(0, std::make_shared<std::string>((8 << 20) + 2, 'x'));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  ASSERT_TRUE(Contribute(1, std::make_shared<std::string>(8 << 20, 'x')).ok());
  EXPECT_EQ(events_->results.WaitFor(1).front().id.chunk, 1u);
}

TEST_F(LoopbackTest, StoppedServerFailsTheNodeOnceWithItsAddress) {
  ASSERT_NO_FATAL_FAILURE(JoinAndExchange());
  server_->Stop(Duration::zero());
  server_->Stop(Duration::zero());
  const absl::Status why = events_->failures.WaitFor(1).front();
  EXPECT_EQ(why.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(Message(why), HasSubstr("aggregator shard 3 at " + server_->address()));
  EXPECT_EQ(Contribute(0, std::make_shared<std::string>("ab")), why);
  const TimePoint begin = Now();
  member_->Leave(absl::OkStatus());
  EXPECT_LT(Now() - begin, seconds(10));
  member_.reset();
  EXPECT_EQ(events_->failures.Get().size(), 1u);
}

TEST_F(LoopbackTest, StoppedServerDoesNotCallTheShardAnyMore) {
  ASSERT_NO_FATAL_FAILURE(JoinAndExchange());
  server_->Stop(Duration::zero());
  const size_t leaves = shard_.leaves.Get().size();
  EXPECT_EQ(leaves, 1u);
  shard_.nodes.Get().front()->OnResult({});
  shard_.nodes.Get().front()->OnFailed(absl::AbortedError("late"));
  member_.reset();
  server_.reset();
  EXPECT_EQ(shard_.leaves.Get().size(), leaves);
}

// This test is for AddressSanitizer: gRPC's threads end with its last user, while streams may still
// be ending on them.
TEST_F(LoopbackTest, NodesAndServersMayGoAtAnyTime) {
  for (int i = 0; i < 50; ++i) {
    // Without a chunk, the stream may still be opening.
    ASSERT_NO_FATAL_FAILURE(i % 2 == 0 ? JoinAndExchange() : Join());
    if (i % 3 == 0) server_.reset();
    member_.reset();
    remote_.reset();
    ASSERT_NO_FATAL_FAILURE(SetUp());
  }
}

TEST_F(LoopbackTest, RefusedContributionFailsTheJobWithTheReason) {
  shard_.contribute_answer = absl::FailedPreconditionError("chunk of epoch 4, expected 5");
  ASSERT_NO_FATAL_FAILURE(Join());
  ASSERT_TRUE(Contribute(0, std::make_shared<std::string>("ab")).ok());
  EXPECT_EQ(shard_.leaves.WaitFor(1).front().second, shard_.contribute_answer.Get());
  const absl::Status why = events_->failures.WaitFor(1).front();
  EXPECT_EQ(why.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(Message(why), HasSubstr("chunk of epoch 4, expected 5"));
}

TEST_F(LoopbackTest, NobodyListeningIsUnavailableWithinTheDeadline) {
  const std::string address = server_->address();
  server_.reset();
  const auto node = RemoteShard::Create(address, {}, metrics_);
  const TimePoint begin = Now();
  const absl::Status status = node->Join(ToShard(2), events_, begin + seconds(3)).status();
  EXPECT_LT(Now() - begin, kTestPatience / 2);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(Message(status), AllOf(HasSubstr("aggregator shard 2 at " + address),
                                     ContainsRegex("within (3|2\\.[0-9]) s"),
                                     HasSubstr("is it running"), HasSubstr("Connection refused")));
}

TEST_F(LoopbackTest, JoinWaitsForAServerThatStartsLater) {
  const std::string address = server_->address();
  server_.reset();
  const auto node = RemoteShard::Create(address, {}, metrics_);
  absl::Status status = absl::UnknownError("did not return");
  {
    Thread joining("join", [&] { status = node->Join({}, events_, Soon()).status(); });
    StartServer(address);
  }
  EXPECT_TRUE(status.ok()) << status;
}

TEST_F(LoopbackTest, TakenPortAndMalformedAddressAreRefused) {
  const auto taken = ShardServer::Start({.listen = server_->address()}, shard_, metrics_);
  EXPECT_EQ(taken.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(Message(taken.status()), HasSubstr(server_->address()));
  const auto malformed = ShardServer::Start({.listen = "nonsense"}, shard_, metrics_);
  EXPECT_EQ(malformed.status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace thalweg::loopback_test
