#include "server/sidecar/bucket/bucket_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/sidecar/testing/job_test_util.h"

namespace thalweg::bucket_table_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class BucketTableTest : public BucketsFixture {
 protected:
  BucketTableTest() : BucketsFixture(HelloOf(0, 2)) {}

  absl::StatusOr<std::shared_ptr<NodeBucket>> AnnounceOne(uint32_t rank, BucketId id,
                                                          const char* tensor) {
    inputs_.push_back(*BucketArena::Create("input", 40, true));
    return table_.Announce(rank, "rank " + std::to_string(5 + rank),
                           {id, {DType::kFloat32, {{tensor, {10}}}}, {}},
                           UniqueFd(dup(inputs_.back().fd())));
  }

  std::vector<BucketArena> inputs_;
};

TEST_F(BucketTableTest, WorkersThatAnnounceTheSameShareABucket) {
  const auto first = AnnounceOne(0, {3, 0}, "w");
  const auto second = AnnounceOne(1, {3, 0}, "w");
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_EQ(*first, *second);
  EXPECT_EQ(table_.Find(3), *first);
  EXPECT_EQ(table_.Find(4), nullptr);
  EXPECT_EQ(table_.All().size(), 1u);
}

TEST_F(BucketTableTest, LayoutThatDiffersIsRefusedNamingBothWorkers) {
  ASSERT_TRUE(AnnounceOne(0, {3, 0}, "w").ok());
  const absl::Status refused = AnnounceOne(1, {3, 0}, "v").status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.message()), AllOf(HasSubstr("rank 5"), HasSubstr("rank 6")));
}

TEST_F(BucketTableTest, NewLayoutReplacesTheEarlierOneAndNotTheOtherWay) {
  const auto earlier = AnnounceOne(0, {3, 0}, "w");
  const auto later = AnnounceOne(0, {3, 1}, "v");
  ASSERT_TRUE(earlier.ok() && later.ok());
  EXPECT_NE(*earlier, *later);
  EXPECT_EQ(table_.Find(3), *later);
  EXPECT_EQ(AnnounceOne(1, {3, 0}, "w").status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(BucketTableTest, ReplacedBucketStaysUntilItIsTaken) {
  const std::weak_ptr<NodeBucket> earlier = *AnnounceOne(0, {3, 0}, "w");
  const auto later = AnnounceOne(0, {3, 1}, "v");
  EXPECT_FALSE(earlier.expired());
  EXPECT_TRUE(table_.TakeReplaced(4).empty());
  EXPECT_EQ(table_.TakeReplaced(3).size(), 1u);
  EXPECT_TRUE(earlier.expired());
}

TEST_F(BucketTableTest, LayoutIsNotReplacedWhileARoundIsInFlight) {
  const auto bucket = AnnounceOne(0, {3, 0}, "w");
  ASSERT_TRUE(AnnounceOne(1, {3, 0}, "w").ok());
  for (uint32_t rank : {0u, 1u}) ASSERT_TRUE((*bucket)->Submit(rank, {{0, 0}, 1}, Now()).ok());
  EXPECT_EQ(AnnounceOne(0, {3, 1}, "v").status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST(ClosedBucketTableTest, AnnouncementBeforeTheJobHasBegunIsRefused) {
  MetricRegistry registry;
  SidecarMetrics metrics(registry);
  JobCompression compression("job", {}, 2, 1, metrics);
  CodecStates states;
  ShardGroup shards({}, registry);
  BucketTable table(states, compression, shards);
  BucketArena input = *BucketArena::Create("input", 40, true);
  const auto bucket = table.Announce(0, "rank 5", {{3, 0}, {DType::kFloat32, {{"w", {10}}}}, {}},
                                     UniqueFd(dup(input.fd())));
  EXPECT_EQ(bucket.status().code(), absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace thalweg::bucket_table_test
