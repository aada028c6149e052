// These tests end a node's waits for a shard early.
#include <gtest/gtest.h>

#include <memory>
#include <stop_token>

#include "core/base/thread.h"
#include "server/transport/node/remote_shard.h"
#include "server/transport/shard/shard_server.h"
#include "server/transport/testing/recording_shard.h"

namespace thalweg::stopped_join_test {
namespace {

class StoppedJoinTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto server = ShardServer::Start({.listen = "127.0.0.1:0"}, shard_, metrics_);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    remote_ = RemoteShard::Create(server_->address(), {}, metrics_);
  }

  MetricRegistry metrics_;
  RecordingShard shard_;
  const std::shared_ptr<RecordingEvents> events_ = std::make_shared<RecordingEvents>();
  std::unique_ptr<ShardServer> server_;
  std::unique_ptr<RemoteShard> remote_;
};

TEST_F(StoppedJoinTest, StoppedJoinEndsAtOnceAndGivesItsSeatUp) {
  shard_.hold_joins = true;
  std::stop_source stop;
  JoinRequest request = OfNode(3);
  request.stop = stop.get_token();
  absl::Status status;
  {
    const Thread joining(
        "join", [&] { status = remote_->Join(request, events_, Now() + kTestPatience).status(); });
    ASSERT_EQ(shard_.joins.WaitFor(1).size(), 1u);
    stop.request_stop();
  }
  EXPECT_TRUE(absl::IsCancelled(status)) << status;
  EXPECT_EQ(shard_.given_up.WaitFor(1).size(), 1u);
  EXPECT_TRUE(
      absl::IsCancelled(remote_->MeasureLink(1, Now() + kTestPatience, stop.get_token()).status()));
}

TEST_F(StoppedJoinTest, StoppedWaitForAConnectionEndsAtOnce) {
  const auto nobody = RemoteShard::Create("127.0.0.1:1", {}, metrics_);
  std::stop_source stop;
  JoinRequest request = OfNode(3);
  request.stop = stop.get_token();
  absl::Status status;
  {
    const Thread joining(
        "join", [&] { status = nobody->Join(request, events_, Now() + kTestPatience).status(); });
    stop.request_stop();
  }
  EXPECT_TRUE(absl::IsCancelled(status)) << status;
}

}  // namespace
}  // namespace thalweg::stopped_join_test
