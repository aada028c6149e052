// These tests cover several TCP connections between a node and a shard; all fail when one fails.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "server/net/address.h"
#include "server/transport/fake_shard.h"
#include "server/transport/remote_shard.h"
#include "server/transport/shard_server.h"

namespace thalweg {
namespace {

using ::testing::HasSubstr;

// Returns this process's sockets that are connected to `address` (IPv4), as the kernel lists them.
std::vector<int> ConnectionsTo(const std::string& address) {
  const int port = ParseHostPort(address)->port;
  std::vector<int> sockets;
  for (int fd = 0; fd < 4096; ++fd) {
    sockaddr_in peer{};
    socklen_t size = sizeof(peer);
    if (getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &size) != 0) continue;
    const bool ipv4 = peer.sin_family == AF_INET;
    const bool mapped = peer.sin_family == AF_INET6;  // the port has the same place
    if ((ipv4 || mapped) && ntohs(peer.sin_port) == port) sockets.push_back(fd);
  }
  return sockets;
}

class ChannelsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto server = ShardServer::Start({.listen = "127.0.0.1:0"}, shard_, metrics_);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }

  void JoinAndAttach(uint32_t channels, double bytes_per_second = 0) {
    node_ = RemoteShard::Create(server_->address(), {.channels = channels}, metrics_);
    // Each test uses a new membership: the streams of an earlier one may not have ended yet.
    JoinRequest request = OfNode(next_node_++);
    request.link.bytes_per_second = bytes_per_second;
    const auto membership = node_->Join(request, Now() + kTestPatience);
    ASSERT_TRUE(membership.ok()) << membership.status();
    token_ = membership->token;
    ASSERT_TRUE(node_->Attach(token_, "", sink_).ok());
  }

  // Contributes chunks 0 to count-1 and waits for their results, so that all streams have been
  // used.
  void Exchange(uint32_t count) {
    for (uint32_t c = 0; c < count; ++c) {
      const auto bytes = std::make_shared<std::string>(4 * (c + 1), static_cast<char>(c));
      const Payload payload(std::as_bytes(std::span(*bytes)), bytes);
      ASSERT_TRUE(
          node_->Contribute(token_, {{{}, c, 1}, 5, WireFormat::kFloat32, c + 1, payload}).ok());
    }
    const auto results = sink_->results.WaitFor(count);
    ASSERT_EQ(results.size(), count);
    for (const RoundResult& result : results) {
      const uint32_t c = result.id.chunk;
      EXPECT_EQ(BytesOf(result.payload), std::string(4 * (c + 1), static_cast<char>(c)));
    }
  }

  MetricRegistry metrics_;
  FakeShard shard_;
  std::shared_ptr<RecordingSink> sink_ = std::make_shared<RecordingSink>();
  std::unique_ptr<ShardServer> server_;
  std::unique_ptr<RemoteShard> node_;
  SessionToken token_ = 0;
  uint32_t next_node_ = 0;
};

TEST_F(ChannelsTest, EachChannelIsAConnectionAndTogetherTheyAreOneSink) {
  for (const uint32_t channels : {1u, 2u, 5u, 16u}) {
    sink_ = std::make_shared<RecordingSink>();
    const size_t sinks_before = shard_.sinks.Get().size();
    JoinAndAttach(channels);
    Exchange(3 * channels);
    EXPECT_EQ(ConnectionsTo(server_->address()).size(), channels);
    EXPECT_EQ(shard_.sinks.Get().size(), sinks_before + 1);
    node_->Leave(token_, absl::OkStatus());
    EXPECT_TRUE(sink_->failures.Get().empty());
    node_.reset();
  }
}

TEST_F(ChannelsTest, RateOfTheLinkChoosesTheNumberOfConnections) {
  for (const auto& [rate, connections] :
       std::vector<std::pair<double, size_t>>{{0, 1}, {599e6, 1}, {600e6, 2}, {12e9, 2}}) {
    sink_ = std::make_shared<RecordingSink>();
    JoinAndAttach(0, rate);
    Exchange(4);
    EXPECT_EQ(ConnectionsTo(server_->address()).size(), connections) << rate;
    node_->Leave(token_, absl::OkStatus());
    node_.reset();
  }
}

TEST_F(ChannelsTest, OneBrokenConnectionFailsTheNodeOnceOnBothSides) {
  for (size_t broken = 0; broken < 3; ++broken) {
    sink_ = std::make_shared<RecordingSink>();
    const size_t leaves_before = shard_.leaves.Get().size();
    JoinAndAttach(3);
    Exchange(6);
    const std::vector<int> sockets = ConnectionsTo(server_->address());
    ASSERT_EQ(sockets.size(), 3u);
    ASSERT_EQ(shutdown(sockets[broken], SHUT_RDWR), 0);
    const auto failures = sink_->failures.WaitFor(1);
    ASSERT_EQ(failures.size(), 1u);
    EXPECT_EQ(failures.front().code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(std::string(failures.front().message()), HasSubstr(server_->address()));
    const auto leaves = shard_.leaves.WaitFor(leaves_before + 1);
    EXPECT_EQ(leaves.back().first, token_);
    EXPECT_EQ(leaves.back().second.code(), absl::StatusCode::kUnavailable);
    EXPECT_EQ(node_->Contribute(token_, {}), failures.front());
    node_.reset();
    EXPECT_EQ(sink_->failures.Get().size(), 1u);
    EXPECT_EQ(shard_.leaves.Get().size(), leaves_before + 1);
  }
}

TEST_F(ChannelsTest, FailedJobIsToldOnceWithItsReason) {
  JoinAndAttach(4);
  Exchange(4);
  const absl::Status why = absl::DeadlineExceededError("job 'a': node 1 is late");
  shard_.sinks.Get().front()->OnFailed(why);
  EXPECT_EQ(sink_->failures.WaitFor(1).front(), why);
  node_.reset();
  EXPECT_EQ(sink_->failures.Get().size(), 1u);
}

TEST_F(ChannelsTest, RefusedContributionIsTheReasonWhicheverStreamItCameOn) {
  for (uint32_t chunk = 0; chunk < 3; ++chunk) {
    sink_ = std::make_shared<RecordingSink>();
    JoinAndAttach(3);
    Exchange(3);
    shard_.contribute_answer = absl::FailedPreconditionError("chunk of epoch 4, expected 5");
    ASSERT_TRUE(node_->Contribute(token_, {{{}, chunk, 1}, 4, WireFormat::kFloat32, 0, {}}).ok());
    const absl::Status why = sink_->failures.WaitFor(1).front();
    EXPECT_EQ(why.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(why.message()), HasSubstr("chunk of epoch 4, expected 5"));
    node_.reset();
    shard_.contribute_answer = absl::OkStatus();
  }
}

// This test is for AddressSanitizer: streams open and end on several connections while their owners
// are destroyed.
TEST_F(ChannelsTest, NodesAndServersMayGoAtAnyTime) {
  for (int i = 0; i < 50; ++i) {
    const size_t attached_before = shard_.sinks.Get().size();
    JoinAndAttach(1 + i % 4);
    if (i % 2 == 0) shard_.sinks.WaitFor(attached_before + 1);
    if (i % 3 == 0) server_.reset();
    node_.reset();
    ASSERT_NO_FATAL_FAILURE(SetUp());
  }
}

}  // namespace
}  // namespace thalweg
