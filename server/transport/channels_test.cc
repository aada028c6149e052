// These tests cover several TCP connections between a node and a shard; all fail when one fails.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "server/net/address.h"
#include "server/transport/node/remote_shard.h"
#include "server/transport/shard/shard_server.h"
#include "server/transport/testing/recording_shard.h"

namespace thalweg::channels_test {
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

  // Replaces the node by the next one, which has its own connections and events.
  void Join(uint32_t channels, double bytes_per_second = 0) {
    Release();
    events_ = std::make_shared<RecordingEvents>();
    remote_ = RemoteShard::Create(server_->address(), {.channels = channels}, metrics_);
    JoinRequest request = OfNode(++node_);
    request.link.bytes_per_second = bytes_per_second;
    auto member = remote_->Join(request, events_, Now() + kTestPatience);
    ASSERT_TRUE(member.ok()) << member.status();
    member_ = *std::move(member);
  }
  void Release() {
    member_.reset();
    remote_.reset();
  }

  // Waits until the node has so many connections, and returns them: gRPC closes those of the one
  // before some time after it was told to.
  std::vector<int> AwaitConnections(size_t count) {
    const TimePoint deadline = Now() + kTestPatience;
    std::vector<int> sockets = ConnectionsTo(server_->address());
    while (sockets.size() != count && Now() < deadline) {
      std::this_thread::yield();
      sockets = ConnectionsTo(server_->address());
    }
    EXPECT_EQ(sockets.size(), count);
    return sockets;
  }

  // Contributes chunks 0 to count-1 and waits for their results, so that all streams have been
  // used.
  void Exchange(uint32_t count) {
    for (uint32_t c = 0; c < count; ++c) {
      const auto bytes = std::make_shared<std::string>(4 * (c + 1), static_cast<char>(c));
      const Payload payload(std::as_bytes(std::span(*bytes)), bytes);
      ASSERT_TRUE(member_->Contribute({{{}, c, 1}, 5, WireFormat::kFloat32, c + 1, payload}).ok());
    }
    const auto results = events_->results.WaitFor(count);
    ASSERT_EQ(results.size(), count);
    for (const RoundResult& result : results) {
      const uint32_t c = result.id.chunk;
      EXPECT_EQ(BytesOf(result.payload), std::string(4 * (c + 1), static_cast<char>(c)));
    }
  }

  MetricRegistry metrics_;
  RecordingShard shard_;
  std::unique_ptr<ShardServer> server_;
  std::shared_ptr<RecordingEvents> events_;
  std::unique_ptr<RemoteShard> remote_;
  std::unique_ptr<Member> member_;
  uint32_t node_ = 0;
};

TEST_F(ChannelsTest, EachChannelIsAConnectionAndTogetherTheyAreOneNode) {
  for (const uint32_t channels : {1u, 2u, 5u, 16u}) {
    const size_t nodes_before = shard_.nodes.Get().size();
    Join(channels);
    Exchange(3 * channels);
    AwaitConnections(channels);
    EXPECT_EQ(shard_.nodes.Get().size(), nodes_before + 1);
    member_->Leave(absl::OkStatus());
    EXPECT_TRUE(events_->failures.Get().empty());
  }
}

TEST_F(ChannelsTest, RateOfTheLinkChoosesTheNumberOfConnections) {
  for (const auto& [rate, connections] :
       std::vector<std::pair<double, size_t>>{{0, 1}, {599e6, 1}, {600e6, 2}, {12e9, 2}}) {
    SCOPED_TRACE(rate);
    Join(0, rate);
    Exchange(4);
    AwaitConnections(connections);
  }
}

TEST_F(ChannelsTest, OneBrokenConnectionFailsTheNodeOnceOnBothSides) {
  for (size_t broken = 0; broken < 3; ++broken) {
    Release();
    const size_t leaves_before = shard_.leaves.Get().size();
    Join(3);
    Exchange(6);
    const std::vector<int> sockets = AwaitConnections(3);
    ASSERT_EQ(sockets.size(), 3u);
    ASSERT_EQ(shutdown(sockets[broken], SHUT_RDWR), 0);
    const auto failures = events_->failures.WaitFor(1);
    ASSERT_EQ(failures.size(), 1u);
    EXPECT_EQ(failures.front().code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(std::string(failures.front().message()), HasSubstr(server_->address()));
    const auto leaves = shard_.leaves.WaitFor(leaves_before + 1);
    EXPECT_EQ(leaves.back().first, node_);
    EXPECT_EQ(leaves.back().second.code(), absl::StatusCode::kUnavailable);
    EXPECT_EQ(member_->Contribute({}), failures.front());
    Release();
    EXPECT_EQ(events_->failures.Get().size(), 1u);
    EXPECT_EQ(shard_.leaves.Get().size(), leaves_before + 1);
  }
}

TEST_F(ChannelsTest, FailedJobIsToldOnceWithItsReason) {
  Join(4);
  Exchange(4);
  const absl::Status why = absl::DeadlineExceededError("job 'a': node 1 is late");
  shard_.nodes.Get().front()->OnFailed(why);
  EXPECT_EQ(events_->failures.WaitFor(1).front(), why);
  Release();
  EXPECT_EQ(events_->failures.Get().size(), 1u);
}

TEST_F(ChannelsTest, RefusedContributionIsTheReasonWhicheverStreamItCameOn) {
  for (uint32_t chunk = 0; chunk < 3; ++chunk) {
    Join(3);
    Exchange(3);
    shard_.contribute_answer = absl::FailedPreconditionError("chunk of epoch 4, expected 5");
    ASSERT_TRUE(member_->Contribute({{{}, chunk, 1}, 4, WireFormat::kFloat32, 0, {}}).ok());
    const absl::Status why = events_->failures.WaitFor(1).front();
    EXPECT_EQ(why.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(why.message()), HasSubstr("chunk of epoch 4, expected 5"));
    Release();
    shard_.contribute_answer = absl::OkStatus();
  }
}

// This test is for AddressSanitizer: streams open and end on several connections while their owners
// are destroyed.
TEST_F(ChannelsTest, NodesAndServersMayGoAtAnyTime) {
  for (int i = 0; i < 50; ++i) {
    ASSERT_NO_FATAL_FAILURE(Join(1 + i % 4));
    if (i % 2 == 0) Exchange(1 + i % 4);  // otherwise the streams may still be opening
    if (i % 3 == 0) server_.reset();
    Release();
    ASSERT_NO_FATAL_FAILURE(SetUp());
  }
}

}  // namespace
}  // namespace thalweg::channels_test
