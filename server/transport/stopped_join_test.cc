// These tests end a node's waits for a shard early.
#include <gtest/gtest.h>

#include <memory>
#include <stop_token>

#include "core/base/thread.h"
#include "server/transport/testing/loopback.h"

namespace thalweg::stopped_join_test {
namespace {

using StoppedJoinTest = Loopback;

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
