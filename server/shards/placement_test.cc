#include "server/shards/placement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace thalweg::placement_test {
namespace {

using ::testing::ElementsAre;

std::vector<uint32_t> ShardsOf(Placement& placement, uint32_t bucket, const ChunkPlan& plan,
                               uint32_t generation = 0) {
  return placement.Place({bucket, generation}, plan, WireFormat::kFloat32).shards;
}

std::vector<uint64_t> BytesPerShard(const std::vector<uint32_t>& shards, const ChunkPlan& plan,
                                    size_t num_shards) {
  std::vector<uint64_t> bytes(num_shards);
  for (uint32_t chunk = 0; chunk < shards.size(); ++chunk) {
    bytes[shards[chunk]] += 4 * plan.Elems(chunk);
  }
  return bytes;
}

TEST(PlacementTest, EqualShardsTakeTurnsAcrossBuckets) {
  Placement placement({1, 1, 1});
  EXPECT_THAT(ShardsOf(placement, 0, {40, 10}), ElementsAre(0, 1, 2, 0));
  EXPECT_THAT(ShardsOf(placement, 1, {30, 10}), ElementsAre(1, 2, 0));
  EXPECT_THAT(ShardsOf(placement, 2, {10, 10}), ElementsAre(1));
}

TEST(PlacementTest, NoShardHasMoreThanOneChunkAboveItsShare) {
  Placement placement({1, 1, 1, 1});
  std::vector<uint64_t> total(4);
  const std::vector<ChunkPlan> buckets = {{1, 512}, {1000, 512}, {7, 512}, {99'999, 512}, {3, 512}};
  for (uint32_t index = 0; index < buckets.size(); ++index) {
    const auto bytes = BytesPerShard(ShardsOf(placement, index, buckets[index]), buckets[index], 4);
    for (size_t k = 0; k < 4; ++k) total[k] += bytes[k];
  }
  const auto [least, most] = std::minmax_element(total.begin(), total.end());
  EXPECT_LE(*most - *least, 512u * 4);
}

TEST(PlacementTest, WeightsDecideTheShares) {
  Placement placement({1, 3, 6});
  const ChunkPlan plan{100'000, 100};
  EXPECT_THAT(BytesPerShard(ShardsOf(placement, 0, plan), plan, 3),
              ElementsAre(40'000, 120'000, 240'000));
}

TEST(PlacementTest, ShardOfWeightZeroGetsNothing) {
  const ChunkPlan plan{1'000, 10};
  for (const std::vector<uint32_t>& weights :
       {std::vector<uint32_t>{0, 0, 5, 5}, {5, 0, 0, 5}, {5, 5, 0, 0}}) {
    Placement placement(weights);
    for (const uint32_t bucket : {0, 1}) {
      const auto bytes = BytesPerShard(ShardsOf(placement, bucket, plan), plan, 4);
      for (size_t k = 0; k < 4; ++k) EXPECT_EQ(bytes[k], weights[k] * 400);
    }
  }
}

TEST(PlacementTest, ReplacedLayoutNoLongerCounts) {
  Placement placement({1, 1});
  ASSERT_THAT(ShardsOf(placement, 0, {10, 10}), ElementsAre(0));
  ASSERT_THAT(ShardsOf(placement, 1, {10, 10}), ElementsAre(1));
  EXPECT_THAT(ShardsOf(placement, 1, {20, 10}, 1), ElementsAre(1, 0));
}

TEST(PlacementTest, BucketIsFoundWhereItWasPlacedUntilItsIndexIsPlacedAgain) {
  Placement placement({1, 1});
  ASSERT_THAT(ShardsOf(placement, 0, {10, 10}), ElementsAre(0));
  ASSERT_THAT(ShardsOf(placement, 1, {20, 10}), ElementsAre(1, 0));
  ASSERT_NE(placement.Find({1, 0}), nullptr);
  EXPECT_THAT(placement.Find({1, 0})->shards, ElementsAre(1, 0));
  EXPECT_EQ(placement.Find({2, 0}), nullptr);
  EXPECT_EQ(placement.Find({1, 1}), nullptr);
  // Also with the same number, for another size: the earlier one counts no more.
  EXPECT_THAT(ShardsOf(placement, 1, {30, 10}), ElementsAre(1, 0, 1));
}

TEST(PlacementTest, RestoredBucketsCountLikeThosePlacedHere) {
  Placement first({1, 2});
  Placement second({1, 2});
  const ChunkPlan plan{70, 10};
  for (const uint32_t bucket : {2, 0, 1}) {
    const auto placed = first.Place({bucket, 0}, plan, WireFormat::kFloat16);
    ASSERT_TRUE(second.Restore({bucket, 0}, placed).ok());
    ASSERT_NE(second.Find({bucket, 0}), nullptr);
    EXPECT_EQ(*second.Find({bucket, 0}), placed);
  }
  // A later layout takes the place of the restored one.
  EXPECT_EQ(ShardsOf(second, 1, {90, 10}, 1), ShardsOf(first, 1, {90, 10}, 1));
  EXPECT_EQ(ShardsOf(second, 3, {90, 10}), ShardsOf(first, 3, {90, 10}));
}

TEST(PlacementTest, ImpossiblePlacementIsNotRestored) {
  Placement placement({1, 2});
  for (const Placement::Placed& placed :
       {Placement::Placed{{2}, {0, 0}}, {{0}, {40}}, {{0}, {40, 0, 0}}}) {
    EXPECT_TRUE(absl::IsInvalidArgument(placement.Restore({0, 0}, placed)));
  }
  ASSERT_TRUE(placement.Restore({0, 0}, {{0}, {40, 0}}).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(placement.Restore({0, 1}, {{0}, {40, 0}})));
}

TEST(PlacementTest, FingerprintTellsPlacementsApart) {
  const std::vector<uint32_t> a = {0, 1, 2}, b = {0, 2, 1}, c = {0, 1};
  EXPECT_NE(Placement::Fingerprint(a), Placement::Fingerprint(b));
  EXPECT_NE(Placement::Fingerprint(a), Placement::Fingerprint(c));
  EXPECT_EQ(Placement::Fingerprint(a), Placement::Fingerprint(std::vector<uint32_t>{0, 1, 2}));
}

}  // namespace
}  // namespace thalweg::placement_test
