// These tests check which peers are admitted, and what happens when certificates are replaced.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <string>

#include "server/net/test_certificates.h"
#include "server/transport/node/remote_shard.h"
#include "server/transport/shard/shard_server.h"
#include "server/transport/testing/recording_shard.h"

namespace thalweg::tls_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class TlsTest : public ::testing::Test {
 protected:
  void SetUp() override { StartServer(ca_.Issue("shard")); }

  void StartServer(const TlsFiles& files) {
    server_.reset();
    auto server = ShardServer::Start({.listen = "127.0.0.1:0", .tls = files}, shard_, metrics_);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }

  std::unique_ptr<RemoteShard> Node(const TlsFiles& files) {
    return RemoteShard::Create(server_->address(), {.channels = 2, .tls = files}, metrics_);
  }

  // Tries to join for a second, which is plenty on this machine, and returns the outcome.
  absl::Status Join(RemoteShard& node) {
    return node
        .Join(OfNode(0), std::make_shared<RecordingEvents>(), Now() + std::chrono::seconds(1))
        .status();
  }
  void ExpectRefused(const TlsFiles& files) {
    const auto node = Node(files);
    const absl::Status status = Join(*node);
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(server_->address()));
    EXPECT_TRUE(shard_.joins.Get().empty());
  }

  // Sends a chunk and waits for the same bytes.
  void Exchange(uint32_t chunk) {
    const auto bytes = std::make_shared<std::string>(1 << 20, static_cast<char>('a' + chunk));
    const Payload payload(std::as_bytes(std::span(*bytes)), bytes);
    ASSERT_TRUE(
        member_->Contribute({{{}, chunk, 1}, 5, WireFormat::kFloat32, 1 << 18, payload}).ok());
    const auto results = events_->results.WaitFor(chunk + 1);
    ASSERT_EQ(results.size(), chunk + 1);
    EXPECT_EQ(BytesOf(results.back().payload), *bytes);
  }
  // Joins as the node that exchanges.
  void JoinWith(const TlsFiles& files) {
    remote_ = Node(files);
    auto member = remote_->Join(OfNode(0), events_, Now() + kTestPatience);
    ASSERT_TRUE(member.ok()) << member.status();
    member_ = *std::move(member);
  }

  const TestCa ca_;
  MetricRegistry metrics_;
  RecordingShard shard_;
  std::unique_ptr<ShardServer> server_;
  const std::shared_ptr<RecordingEvents> events_ = std::make_shared<RecordingEvents>();
  std::unique_ptr<RemoteShard> remote_;
  std::unique_ptr<Member> member_;
};

TEST_F(TlsTest, NodesOfTheSameCaExchange) {
  ASSERT_NO_FATAL_FAILURE(JoinWith(ca_.Issue("sidecar")));
  for (uint32_t chunk = 0; chunk < 4; ++chunk) ASSERT_NO_FATAL_FAILURE(Exchange(chunk));
}

TEST_F(TlsTest, NodeWithoutTlsIsRefused) { ExpectRefused({}); }

TEST_F(TlsTest, NodeOfAnotherCaIsRefusedByTheShard) {
  const TestCa other;
  TlsFiles files = other.Issue("sidecar");
  files.ca = ca_.folder() + "/ca.crt";  // it trusts the shard
  ExpectRefused(files);
}

TEST_F(TlsTest, NodeRefusesAShardOfAnotherCa) {
  const TestCa other;
  TlsFiles files = ca_.Issue("sidecar");  // the shard would trust it
  files.ca = other.Issue("x").ca;
  ExpectRefused(files);
}

TEST_F(TlsTest, NodeRefusesACertificateForAnotherHost) {
  StartServer(ca_.IssueFor("shard-0.elsewhere"));
  const auto node = Node(ca_.Issue("sidecar"));
  const absl::Status status = Join(*node);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("trust the other's certificate"), HasSubstr("127.0.0.1")));
}

TEST_F(TlsTest, NodeWithTlsIsNotServedByAShardWithout) {
  StartServer({});
  ExpectRefused(ca_.Issue("sidecar"));
}

TEST_F(TlsTest, ReplacedCertificatesCountForNewConnectionsAndOpenStreamsLiveOn) {
  ASSERT_NO_FATAL_FAILURE(JoinWith(ca_.Issue("sidecar")));
  ASSERT_NO_FATAL_FAILURE(Exchange(0));

  // The shard's files are replaced by those of another CA.
  const TestCa other;
  const TlsFiles replacement = other.Issue("shard");
  for (const char* name : {"shard.crt", "shard.key", "ca.crt"}) {
    std::filesystem::copy_file(other.folder() + "/" + name, ca_.folder() + "/" + name,
                               std::filesystem::copy_options::overwrite_existing);
  }
  const TlsFiles files = other.Issue("sidecar");
  const TimePoint deadline = Now() + kTestPatience;
  absl::Status late = absl::UnknownError("not tried");
  while (!late.ok() && Now() < deadline) {
    const auto node = Node(files);
    late = Join(*node);
  }
  EXPECT_TRUE(late.ok()) << late;
  ASSERT_NO_FATAL_FAILURE(Exchange(1));
  EXPECT_TRUE(events_->failures.Get().empty());
}

}  // namespace
}  // namespace thalweg::tls_test
