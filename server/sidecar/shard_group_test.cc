#include "server/sidecar/shard_group.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <vector>

namespace thalweg {
namespace {

using ::testing::HasSubstr;

constexpr Duration kPatience = std::chrono::seconds(30);

// Admits everybody with a window of two chunks, and remembers.
class FakeShard : public Shard {
 public:
  absl::StatusOr<Membership> Join(const JoinRequest& request, TimePoint) override {
    joined = request;
    if (!refusal.ok()) return refusal;
    return Membership{7, 1, 2};
  }
  absl::Status Attach(SessionToken, std::shared_ptr<NodeSink> node) override {
    sink = std::move(node);
    return absl::OkStatus();
  }
  absl::Status RegisterBucket(SessionToken, BucketId, const BucketLayout&, TimePoint) override {
    return absl::OkStatus();
  }
  absl::Status Contribute(SessionToken, Contribution contribution) override {
    chunks.push_back(contribution.id.chunk);
    return absl::OkStatus();
  }
  absl::Status Heartbeat(SessionToken, TimePoint) override { return heartbeat; }
  void Leave(SessionToken, const absl::Status& reason) override { left.push_back(reason); }

  absl::Status refusal, heartbeat;
  JoinRequest joined;
  std::shared_ptr<NodeSink> sink;
  std::vector<uint32_t> chunks;
  std::vector<absl::Status> left;
};

class NullSink : public NodeSink {
  void OnResult(RoundResult) override {}
  void OnFailed(absl::Status) override {}
};

Contribution Chunk(uint32_t chunk) {
  Contribution c;
  c.id = {{0, 0}, chunk, 1};
  return c;
}

class ShardGroupTest : public ::testing::Test {
 protected:
  absl::Status Join() {
    return group_.Join(
        {}, [](uint32_t) { return std::make_shared<NullSink>(); }, Now() + kPatience);
  }
  FakeShard a_, b_;
  ShardGroup group_{{&a_, &b_}};
};

TEST_F(ShardGroupTest, EveryShardIsToldItsPlace) {
  ASSERT_TRUE(Join().ok());
  EXPECT_EQ(a_.joined.shard, 0u);
  EXPECT_EQ(b_.joined.shard, 1u);
  EXPECT_EQ(b_.joined.num_shards, 2u);
}

TEST_F(ShardGroupTest, ChunksGoRoundAllShards) {
  ASSERT_TRUE(Join().ok());
  for (uint32_t chunk = 0; chunk < 4; ++chunk) {
    ASSERT_TRUE(group_.Contribute(Chunk(chunk), Now()).ok());
  }
  EXPECT_EQ(a_.chunks, (std::vector<uint32_t>{0, 2}));
  EXPECT_EQ(b_.chunks, (std::vector<uint32_t>{1, 3}));
}

TEST_F(ShardGroupTest, FullWindowWaitsForAnAnswer) {
  ASSERT_TRUE(Join().ok());
  ASSERT_TRUE(group_.Contribute(Chunk(0), Now()).ok());
  ASSERT_TRUE(group_.Contribute(Chunk(2), Now()).ok());
  const absl::Status full = group_.Contribute(Chunk(4), Now());
  EXPECT_EQ(full.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(full.message()), HasSubstr("shard 0 owes 2 results"));
  auto waiting = std::async(std::launch::async,
                            [&] { return group_.Contribute(Chunk(4), Now() + kPatience); });
  group_.OnAnswered(0);
  EXPECT_TRUE(waiting.get().ok());
  EXPECT_EQ(a_.chunks.size(), 3u);
}

TEST_F(ShardGroupTest, LeavingEndsWaitsAndTellsEveryShardOnce) {
  ASSERT_TRUE(Join().ok());
  ASSERT_TRUE(group_.Contribute(Chunk(0), Now()).ok());
  ASSERT_TRUE(group_.Contribute(Chunk(2), Now()).ok());
  auto waiting = std::async(std::launch::async,
                            [&] { return group_.Contribute(Chunk(4), Now() + kPatience); });
  group_.Leave(absl::AbortedError("because"));
  group_.Leave(absl::OkStatus());
  EXPECT_EQ(waiting.get().message(), "because");
  for (FakeShard* shard : {&a_, &b_}) {
    ASSERT_EQ(shard->left.size(), 1u);
    EXPECT_EQ(shard->left[0].message(), "because");
  }
}

TEST_F(ShardGroupTest, RefusalOfOneShardIsReturnedAndOnlyJoinedOnesAreLeft) {
  b_.refusal = absl::InvalidArgumentError("no");
  EXPECT_EQ(Join().message(), "no");
  group_.Leave(absl::InvalidArgumentError("no"));
  EXPECT_EQ(a_.left.size(), 1u);
  EXPECT_TRUE(b_.left.empty());
}

TEST_F(ShardGroupTest, OnlyAShardThatForgotUsFailsTheHeartbeat) {
  ASSERT_TRUE(Join().ok());
  a_.heartbeat = absl::UnavailableError("slow");
  EXPECT_TRUE(group_.Heartbeat().ok());
  a_.heartbeat = absl::NotFoundError("who?");
  EXPECT_FALSE(group_.Heartbeat().ok());
}

}  // namespace
}  // namespace thalweg
