// These tests break the connection between a node and a shard: what was on the way must arrive,
// once and in order, and a connection that does not come back must fail the node.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "server/transport/node/remote_shard.h"
#include "server/transport/shard/shard_server.h"
#include "server/transport/testing/breaking_proxy.h"
#include "server/transport/testing/recording_shard.h"

namespace thalweg::reconnect_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr size_t kChunkBytes = 16 << 10;

class ReconnectTest : public ::testing::Test {
 protected:
  void Start(Duration grace, BreakingProxy::Budget budget = nullptr, uint32_t channels = 1) {
    auto server = ShardServer::Start({.listen = "127.0.0.1:0"}, shard_, metrics_);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    uint32_t port = 0;
    const std::vector<std::string> parts = absl::StrSplit(server_->address(), ':');
    ASSERT_TRUE(absl::SimpleAtoi(parts.back(), &port));
    proxy_ = std::make_unique<BreakingProxy>(port, std::move(budget));
    remote_ =
        RemoteShard::Create(proxy_->address(), {.channels = channels, .grace = grace}, metrics_);
    // Under a proxy that breaks everything, Join may take several attempts.
    const TimePoint deadline = Now() + kTestPatience;
    absl::StatusOr<std::unique_ptr<Member>> member = absl::UnavailableError("not tried");
    while (!member.ok() && Now() < deadline) member = remote_->Join(OfNode(0), events_, deadline);
    ASSERT_TRUE(member.ok()) << member.status();
    member_ = *std::move(member);
  }

  // The bytes of a chunk say which it is.
  static std::shared_ptr<const std::string> BytesFor(uint32_t chunk) {
    return std::make_shared<std::string>(kChunkBytes, static_cast<char>('a' + chunk % 26));
  }

  absl::Status Contribute(uint32_t chunk, std::shared_ptr<const std::string> bytes) {
    return member_->Contribute({{{7, 1}, chunk, 1},
                                5,
                                WireFormat::kFloat32,
                                bytes->size() / 4,
                                Payload(std::as_bytes(std::span(*bytes)), bytes)});
  }

  double Resumed(const std::string& role) {
    return metrics_.GetCounter("thalweg_grpc_resumed_streams_total", "", {{"role", role}}).Value();
  }

  MetricRegistry metrics_;
  RecordingShard shard_;
  std::shared_ptr<RecordingEvents> events_ = std::make_shared<RecordingEvents>();
  std::unique_ptr<ShardServer> server_;
  std::unique_ptr<BreakingProxy> proxy_;
  std::unique_ptr<RemoteShard> remote_;
  std::unique_ptr<Member> member_;
};

TEST_F(ReconnectTest, EveryChunkArrivesOnceWhileConnectionsBreakAtRandom) {
  constexpr uint32_t kChunks = 600;
  constexpr uint32_t kWindow = 16;
  std::mt19937_64 random(7);
  // A connection carries up to 12 chunks: breaks come in the middle of frames, in either direction.
  Start(kTestPatience, [random]() mutable { return 1000 + random() % (12 * kChunkBytes); }, 2);
  for (uint32_t chunk = 0; chunk < kChunks; ++chunk) {
    if (chunk >= kWindow) {
      ASSERT_GT(events_->results.WaitFor(chunk - kWindow + 1).size(), chunk - kWindow);
    }
    ASSERT_TRUE(Contribute(chunk, BytesFor(chunk)).ok());
  }
  const auto results = events_->results.WaitFor(kChunks);
  ASSERT_EQ(results.size(), kChunks);
  std::map<uint32_t, int> seen;
  for (const RoundResult& result : results) {
    ++seen[result.id.chunk];
    EXPECT_EQ(BytesOf(result.payload), *BytesFor(result.id.chunk));
  }
  EXPECT_EQ(seen.size(), kChunks);
  EXPECT_EQ(shard_.contributions.Get().size(), kChunks);
  EXPECT_TRUE(events_->failures.Get().empty());
  EXPECT_TRUE(shard_.leaves.Get().empty());
  EXPECT_GT(Resumed("client"), 20);
  const double client = Resumed("client");  // connections still break
  EXPECT_GE(Resumed("server"), client);
  const auto node = shard_.nodes.Get().back();
  const TimePoint deadline = Now() + kTestPatience;
  while (node->Reconnections() != Resumed("server") && Now() < deadline) std::this_thread::yield();
  EXPECT_LT(Now(), deadline) << "they are counted differently";
}

TEST_F(ReconnectTest, ShardLearnsHowLongAConnectionMayBeAway) {
  Start(kTestPatience);
  EXPECT_EQ(shard_.joins.Get().front().first.grace, kTestPatience);
}

TEST_F(ReconnectTest, ControlCallIsRepeatedAfterABreak) {
  Start(kTestPatience);
  for (int i = 0; i < 20; ++i) {
    proxy_->Break();
    ASSERT_TRUE(member_->Register({}, Now() + kTestPatience).ok());
    ASSERT_TRUE(member_->Heartbeat(Now() + kTestPatience).ok());
  }
}

TEST_F(ReconnectTest, ConnectionThatDoesNotComeBackFailsTheNodeAfterTheGrace) {
  Start(milliseconds(300));
  ASSERT_TRUE(Contribute(0, BytesFor(0)).ok());
  ASSERT_EQ(events_->results.WaitFor(1).size(), 1u);
  proxy_->SetOpen(false);
  const TimePoint begin = Now();
  proxy_->Break();
  const auto failures = events_->failures.WaitFor(1);
  ASSERT_EQ(failures.size(), 1u);
  EXPECT_GE(Now() - begin, milliseconds(300));
  EXPECT_EQ(failures[0].code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(failures[0].message()),
              AllOf(HasSubstr("it has not come back within 0.3 s: "), Not(HasSubstr("CANCELLED"))));
  EXPECT_EQ(Contribute(1, BytesFor(1)), failures[0]);
  // The node stays a member until the aggregator's lease of it, or the server's patience, is over.
  EXPECT_TRUE(shard_.leaves.Get().empty());
}

TEST_F(ReconnectTest, NodeThatGivesUpSaysWhyThereIsNoConnection) {
  Start(std::chrono::seconds(5));
  ASSERT_TRUE(Contribute(0, BytesFor(0)).ok());
  ASSERT_EQ(events_->results.WaitFor(1).size(), 1u);
  proxy_->SetOpen(false);
  proxy_->Break();
  const auto failures = events_->failures.WaitFor(1);
  ASSERT_EQ(failures.size(), 1u);
  EXPECT_THAT(std::string(failures[0].message()),
              AllOf(HasSubstr("it has not come back within 5 s: "),
                    HasSubstr("failed to connect to all addresses")));
}

TEST_F(ReconnectTest, WithoutAGraceABreakFailsTheNodeAtOnce) {
  Start(Duration::zero());
  ASSERT_TRUE(Contribute(0, BytesFor(0)).ok());
  ASSERT_EQ(events_->results.WaitFor(1).size(), 1u);
  proxy_->Break();
  EXPECT_EQ(events_->failures.WaitFor(1).size(), 1u);
  const auto leaves = shard_.leaves.WaitFor(1);
  ASSERT_EQ(leaves.size(), 1u);
  EXPECT_EQ(leaves.front().second, absl::UnavailableError("lost its connection to the shard"));
}

TEST_F(ReconnectTest, PayloadIsReleasedOnceItsResultHasArrived) {
  Start(kTestPatience);
  auto bytes = BytesFor(0);
  const std::weak_ptr<const std::string> payload = bytes;
  ASSERT_TRUE(Contribute(0, std::move(bytes)).ok());
  ASSERT_EQ(events_->results.WaitFor(1).size(), 1u);
  // gRPC may report after that that it has sent the chunk.
  const TimePoint deadline = Now() + kTestPatience;
  while (!payload.expired() && Now() < deadline) std::this_thread::yield();
  EXPECT_TRUE(payload.expired());
}

TEST_F(ReconnectTest, FailureIsToldToANodeThatComesBack) {
  Start(kTestPatience);
  ASSERT_TRUE(Contribute(0, BytesFor(0)).ok());
  ASSERT_EQ(events_->results.WaitFor(1).size(), 1u);
  proxy_->SetOpen(false);
  proxy_->Break();
  const absl::Status why = absl::AbortedError("node 1 is gone");
  shard_.nodes.Get().front()->OnFailed(why);
  proxy_->SetOpen(true);
  const auto failures = events_->failures.WaitFor(1);
  ASSERT_EQ(failures.size(), 1u);
  EXPECT_EQ(failures[0], why);
}

// Opens the node's streams at a shard that knows neither the node nor what it has received.
TEST_F(ReconnectTest, ShardThatHasForgottenTheNodeSaysSo) {
  for (uint32_t chunk : {0u, 1u}) {  // of the two streams, one has had no result yet
    SCOPED_TRACE(chunk);
    events_ = std::make_shared<RecordingEvents>();
    Start(kTestPatience, nullptr, 2);
    ASSERT_TRUE(Contribute(chunk, BytesFor(chunk)).ok());
    ASSERT_EQ(events_->results.WaitFor(1).size(), 1u);
    proxy_->SetOpen(false);
    proxy_->Break();
    const std::string address = server_->address();
    server_->Stop(Duration::zero());
    server_.reset();
    RecordingShard restarted;
    auto server = ShardServer::Start({.listen = address}, restarted, metrics_);
    ASSERT_TRUE(server.ok()) << server.status();
    proxy_->SetOpen(true);
    const auto failures = events_->failures.WaitFor(1);
    ASSERT_EQ(failures.size(), 1u);
    EXPECT_EQ(failures[0].code(), absl::StatusCode::kNotFound) << failures[0];
    EXPECT_TRUE(absl::IsNotFound(Contribute(chunk + 2, BytesFor(chunk))));
    member_.reset();
    remote_.reset();
    (*server)->Stop(Duration::zero());
  }
}

TEST_F(ReconnectTest, SuppliedResultArrivesAsOne) {
  Start(kTestPatience);
  const auto bytes = BytesFor(3);
  RoundResult result = ResultOf(3, Payload(std::as_bytes(std::span(*bytes)), bytes));
  result.nonfinite_elems = 4;
  ASSERT_TRUE(member_->Supply(result).ok());
  const auto supplied = shard_.supplied.WaitFor(1);
  ASSERT_EQ(supplied.size(), 1u);
  EXPECT_EQ(supplied[0].id, result.id);
  EXPECT_EQ(supplied[0].epoch, result.epoch);
  EXPECT_EQ(supplied[0].workers, 1u);
  EXPECT_EQ(supplied[0].nonfinite_elems, 4u);
  EXPECT_EQ(BytesOf(supplied[0].payload), *bytes);
  EXPECT_TRUE(shard_.contributions.Get().empty());
}

TEST_F(ReconnectTest, NodeThatLeavesWhileItIsAwayDoesNotWaitForTheGrace) {
  Start(seconds(60));
  proxy_->SetOpen(false);
  proxy_->Break();
  const TimePoint begin = Now();
  member_->Leave(absl::OkStatus());
  EXPECT_LT(Now() - begin, seconds(20));
  EXPECT_TRUE(events_->failures.Get().empty());
}

TEST_F(ReconnectTest, StoppingServerFailsTheNodeAtOnce) {
  Start(seconds(50));
  ASSERT_TRUE(Contribute(0, BytesFor(0)).ok());
  ASSERT_EQ(events_->results.WaitFor(1).size(), 1u);
  const TimePoint begin = Now();
  server_->Stop(kTestPatience);
  const auto failures = events_->failures.WaitFor(1);
  EXPECT_LT(Now() - begin, seconds(20));
  ASSERT_EQ(failures.size(), 1u);
  EXPECT_THAT(std::string(failures[0].message()), HasSubstr("is stopping"));
}

}  // namespace
}  // namespace thalweg::reconnect_test
