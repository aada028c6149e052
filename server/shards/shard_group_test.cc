#include "server/shards/shard_group.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "core/base/protocol.h"
#include "core/base/testing/test_patience.h"
#include "server/shards/testing/fake_shard.h"

namespace thalweg::shard_group_test {
namespace {

using ::testing::HasSubstr;

Contribution Chunk(uint32_t chunk) {
  Contribution c;
  c.id = {{0, 0}, chunk, 1};
  return c;
}

class ShardGroupTest : public ::testing::Test {
 protected:
  absl::Status Join(const JoinRequest& request = {}) {
    return group_.Join(
        request, [](uint32_t) { return std::make_shared<NullSink>(); }, Now() + kTestPatience);
  }
  FakeShard a_, b_;
  MetricRegistry metrics_;
  ShardGroup group_{{&a_, &b_}, metrics_};
};

TEST_F(ShardGroupTest, EveryShardIsToldItsPlace) {
  ASSERT_TRUE(Join().ok());
  EXPECT_EQ(a_.joined.shard, 0u);
  EXPECT_EQ(b_.joined.shard, 1u);
  EXPECT_EQ(b_.joined.num_shards, 2u);
}

TEST_F(ShardGroupTest, EveryShardIsToldTheJobsIdentity) {
  JoinRequest request;
  request.identity = "id";
  ASSERT_TRUE(Join(request).ok());
  for (const FakeShard* shard : {&a_, &b_}) EXPECT_EQ(shard->joined.identity, "id");
}

TEST_F(ShardGroupTest, LinkIsMeasuredOnceAndToldToAllShardsWithTheFirstOnesTerms) {
  b_.link = {1e6, {}};
  JoinRequest request;
  request.node = 3;  // measures shard 1
  request.num_nodes = 4;
  ASSERT_TRUE(Join(request).ok());
  EXPECT_EQ(a_.joined.link.bytes_per_second, 1e6);
  EXPECT_EQ(b_.joined.link.bytes_per_second, 1e6);
  EXPECT_EQ(a_.num_measurements, 0);
  EXPECT_EQ(b_.num_measurements, 1);
  EXPECT_EQ(a_.joined.chunk_bytes, 0u);
  EXPECT_EQ(b_.joined.chunk_bytes, kMinChunkBytes);
  EXPECT_EQ(a_.joined.window_chunks, 0u);
  EXPECT_EQ(b_.joined.window_chunks, 2u);
}

TEST_F(ShardGroupTest, FirstShardAloneSettlesLinkAndCosts) {
  JoinRequest request;
  request.costs = {{1, 2, 3}};
  a_.agreed_costs = {{4, 5, 6}};
  a_.agreed_link = {7e6, std::chrono::milliseconds(8)};
  b_.agreed_link = {1, {}};
  ASSERT_TRUE(Join(request).ok());
  EXPECT_EQ(a_.joined.costs, request.costs);
  EXPECT_TRUE(b_.joined.costs.empty());
  EXPECT_EQ(group_.agreed().costs, a_.agreed_costs);
  EXPECT_EQ(group_.agreed().link.bytes_per_second, 7e6);
  EXPECT_EQ(group_.agreed().link.round_trip, std::chrono::milliseconds(8));
}

TEST_F(ShardGroupTest, CostsOfAnotherNumberOfCodecsAreRefused) {
  a_.agreed_costs.resize(2);
  JoinRequest request;
  request.costs.resize(1);
  const absl::Status joined = Join(request);
  EXPECT_EQ(joined.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(joined.message()), HasSubstr("costs of 2 codecs, expected 1"));
}

TEST_F(ShardGroupTest, AllShardsAreToldTheSamePlacement) {
  ASSERT_TRUE(Join().ok());
  const BucketLayout layout{DType::kFloat32, {{"w", {40}}}};
  const auto placed = group_.RegisterBucket({{}, layout}, {40, 10}, Now() + kTestPatience);
  ASSERT_TRUE(placed.ok());
  EXPECT_EQ(placed->shards, (std::vector<uint32_t>{0, 1, 0, 1}));
  EXPECT_EQ(a_.placements, std::vector<uint64_t>{Placement::Fingerprint(placed->shards)});
  EXPECT_EQ(b_.placements, a_.placements);
}

TEST_F(ShardGroupTest, FullWindowOfOneShardDoesNotHoldUpAnother) {
  ASSERT_TRUE(Join().ok());
  for (const uint32_t chunk : {0, 2, 4}) ASSERT_TRUE(group_.Contribute(0, Chunk(chunk)).ok());
  for (const uint32_t chunk : {1, 3}) ASSERT_TRUE(group_.Contribute(1, Chunk(chunk)).ok());
  EXPECT_EQ(a_.chunks().size(), 2u);
  EXPECT_EQ(b_.chunks().size(), 2u);
  EXPECT_EQ(group_.PendingShards(),
            "aggregator shard 0 (2 results), aggregator shard 1 (2 results)");
  ASSERT_TRUE(group_.OnAnswered(0, 0, 0).ok());
  ASSERT_EQ(a_.chunks().size(), 3u);
  EXPECT_EQ(a_.chunks()[2].chunk, 4u);
  EXPECT_EQ(b_.chunks().size(), 2u);
}

TEST_F(ShardGroupTest, WindowOfOnePartDoesNotHoldUpAnother) {
  ASSERT_TRUE(Join().ok());
  for (const uint32_t chunk : {0, 2, 4}) ASSERT_TRUE(group_.Contribute(0, Chunk(chunk)).ok());
  Contribution other = Chunk(0);
  other.id.bucket.part = 1;
  ASSERT_TRUE(group_.Contribute(0, other).ok());
  ASSERT_EQ(a_.chunks().size(), 3u);
  EXPECT_EQ(a_.chunks()[2].bucket.part, 1u);
}

TEST_F(ShardGroupTest, WindowOfOneGroupDoesNotHoldUpAnother) {
  ASSERT_TRUE(Join().ok());
  Contribution of_group = Chunk(0);
  of_group.id.bucket = OneShotsOf(3);
  of_group.group = 3;
  EXPECT_THAT(std::string(group_.Contribute(0, of_group).message()),
              HasSubstr("group 3 has not been declared"));
  ASSERT_TRUE(group_.MakeGroup({3, {{0, 1}}, 3}, Now() + kTestPatience).ok());
  for (FakeShard* shard : {&a_, &b_}) ASSERT_EQ(shard->groups.size(), 1u);
  for (const uint32_t chunk : {0, 2, 4}) ASSERT_TRUE(group_.Contribute(0, Chunk(chunk)).ok());
  ASSERT_EQ(a_.chunks().size(), 2u);
  for (uint32_t chunk = 0; chunk < 4; ++chunk) {
    of_group.id.chunk = chunk;
    ASSERT_TRUE(group_.Contribute(0, of_group).ok());
  }
  EXPECT_EQ(a_.chunks().size(), 2u + 3u);
  ASSERT_TRUE(group_.OnAnswered(0, 3, 0).ok());
  EXPECT_EQ(a_.chunks().size(), 2u + 4u);
}

TEST_F(ShardGroupTest, AnswersDuringContributeSendTheRestWithoutRecursion) {
  ASSERT_TRUE(Join().ok());
  // As a shard in this process does when the contribution completes the round.
  int depth = 0, deepest = 0;
  a_.on_contribute = [&](const Contribution&) {
    deepest = std::max(deepest, ++depth);
    EXPECT_TRUE(group_.OnAnswered(0, 0, 0).ok());
    --depth;
  };
  for (uint32_t chunk = 0; chunk < 10; ++chunk) {
    ASSERT_TRUE(group_.Contribute(0, Chunk(chunk)).ok());
  }
  EXPECT_EQ(a_.chunks().size(), 10u);
  EXPECT_EQ(deepest, 1);
}

TEST_F(ShardGroupTest, LeavingDropsWhatWaitsAndTellsEveryShardOnce) {
  ASSERT_TRUE(Join().ok());
  for (const uint32_t chunk : {0, 2, 4}) ASSERT_TRUE(group_.Contribute(0, Chunk(chunk)).ok());
  EXPECT_FALSE(a_.joined.stop.stop_requested());
  group_.Leave(absl::AbortedError("because"));
  group_.Leave(absl::OkStatus());
  EXPECT_TRUE(a_.joined.stop.stop_requested());
  EXPECT_EQ(group_.Contribute(1, Chunk(1)).message(), "because");
  EXPECT_TRUE(group_.OnAnswered(0, 0, 0).ok());
  EXPECT_EQ(a_.chunks().size(), 2u);
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

TEST_F(ShardGroupTest, SnapshotsAreThoseThatAllShardsHave) {
  ASSERT_TRUE(Join().ok());
  a_.snapshots = {{{0, 10}, {0, 20}, {1, 5}}, false};
  b_.snapshots = {{{0, 20}, {0, 30}, {1, 5}}, true};
  const SnapshotCall call{SnapshotAction::kTake, {1, 6}, SnapshotId{1, 5}};
  const auto all = group_.Snapshots(call, Now() + kTestPatience);
  ASSERT_TRUE(all.ok()) << all.status();
  EXPECT_EQ(*all, (SnapshotReport{{{0, 20}, {1, 5}}, true}));
  for (const FakeShard* shard : {&a_, &b_}) EXPECT_EQ(shard->snapshot_calls.back(), call);
}

TEST_F(ShardGroupTest, OnlyAShardThatForgotUsFailsTheHeartbeat) {
  ASSERT_TRUE(Join().ok());
  a_.heartbeat = absl::UnavailableError("slow");
  EXPECT_TRUE(group_.Heartbeat(0).ok());
  a_.heartbeat = absl::NotFoundError("who?");
  EXPECT_FALSE(group_.Heartbeat(0).ok());
  EXPECT_TRUE(group_.Heartbeat(1).ok());
}

TEST_F(ShardGroupTest, HeartbeatReturnsTheNodesThatTheShardHasLost) {
  ASSERT_TRUE(Join().ok());
  b_.lost = {{"node 1 (x)", "is gone"}, {"node 2 (y)", "is silent"}};
  EXPECT_TRUE(group_.Heartbeat(0).value().empty());
  EXPECT_EQ(group_.Heartbeat(1).value(), b_.lost);
}

// Two shards sum two chunks each of a bucket that an earlier process has placed.
class TakenUpGroupTest : public ShardGroupTest {
 protected:
  static constexpr BucketId kBucket{3, 1};

  TakenUpGroupTest() {
    KeptPlaces::Bucket bucket{{{1, 1, 0, 1}, {40, 120}}, {kBucket, {}}, {}};
    for (uint32_t chunk = 0; chunk < 4; ++chunk) {
      bucket.results.push_back({.id = {kBucket, chunk, 7}});
    }
    kept_.terms = {{11, kMinChunkBytes, 2}, {12, kMinChunkBytes, 2}};
    kept_.shares = {1, 3};
    kept_.buckets.push_back(std::move(bucket));
  }
  absl::Status TakeUp() {
    JoinRequest request;
    request.costs.resize(2);
    return group_.TakeUp(
        request, kept_, [](uint32_t) { return std::make_shared<NullSink>(); },
        Now() + kTestPatience);
  }
  KeptPlaces kept_;
};

TEST_F(TakenUpGroupTest, EveryShardGetsItsPlaceAndTheResultsOfItsChunks) {
  ASSERT_TRUE(TakeUp().ok());
  EXPECT_EQ(b_.joined.shard, 1u);
  EXPECT_EQ(b_.joined.num_shards, 2u);
  EXPECT_EQ(a_.joined.costs.size(), 2u);  // as in a first join, which tells only the first shard
  EXPECT_EQ(b_.joined.costs.size(), 0u);
  const std::vector<uint32_t> of_a = {2}, of_b = {0, 1, 3};
  for (const auto& [seat, epoch, chunks] :
       {std::tuple(a_.taken_up, 11u, of_a), {b_.taken_up, 12u, of_b}}) {
    ASSERT_EQ(seat.buckets.size(), 1u);
    EXPECT_EQ(seat.buckets[0].id, kBucket);
    EXPECT_EQ(seat.buckets[0].placement, Placement::Fingerprint(kept_.buckets[0].placed.shards));
    std::vector<uint32_t> given;
    for (const RoundResult& result : seat.results) {
      given.push_back(result.id.chunk);
      EXPECT_EQ(result.epoch, epoch);
    }
    EXPECT_EQ(given, chunks);
  }
  EXPECT_EQ(group_.epochs(), (std::vector<uint64_t>{11, 12}));
}

TEST_F(TakenUpGroupTest, LaterBucketsArePlacedAsIfTheProcessHadLivedOn) {
  ASSERT_TRUE(TakeUp().ok());
  Placement lived({1, 3});
  ASSERT_TRUE(lived.Restore(kBucket, kept_.buckets[0].placed).ok());
  const BucketAnnouncement next{{4, 0}, {DType::kFloat32, {{"w", {40}}}}};
  const auto placed = group_.RegisterBucket(next, {40, 10}, Now() + kTestPatience);
  ASSERT_TRUE(placed.ok());
  EXPECT_EQ(*placed, lived.Place(next.id, {40, 10}, WireFormat::kFloat32));
}

TEST_F(TakenUpGroupTest, TermsOfAnotherNumberOfShardsAreRefused) {
  kept_.terms.pop_back();
  EXPECT_TRUE(absl::IsInvalidArgument(TakeUp()));
}

TEST_F(TakenUpGroupTest, RefusalOfOneShardIsReturned) {
  b_.refusal = absl::FailedPreconditionError("the reason");
  EXPECT_EQ(TakeUp(), b_.refusal);
}

}  // namespace
}  // namespace thalweg::shard_group_test
