// These tests send one-shot rounds through a RoundEngine.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "server/round/round_engine.h"
#include "server/round/round_test_util.h"

namespace thalweg::one_shot_test {
namespace {

using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Verdict = RoundEngine::Verdict;

constexpr TimePoint kStart{};
constexpr Collective kSum{Place::All(), Place::All(), Fold::kSum};

RoundId OneShot(uint64_t sequence, uint32_t group = 0, uint32_t chunk = 0) {
  return {OneShotsOf(group), chunk, sequence};
}

class OneShotTest : public ::testing::Test {
 protected:
  absl::StatusOr<RoundEngine::Added> Add(uint32_t node, const RoundId& id, uint64_t settled = 0) {
    Contribution share = ShareOf(id, kSum, 1, id.bucket.generation);
    share.settled = settled;
    return engine_.Add(node, share, kStart);
  }
  // Both nodes contribute; each has settled `settled`.
  void Complete(uint64_t sequence, uint64_t settled = 0) {
    ASSERT_EQ(Add(0, OneShot(sequence), settled)->verdict, Verdict::kHeld);
    ASSERT_EQ(Add(1, OneShot(sequence), settled)->verdict, Verdict::kCompleted);
  }

  RoundEngine engine_{{1, 2, 8, seconds(10)}};
};

TEST_F(OneShotTest, SeveralSequencesAreOpenAtOnceAndCompleteInAnyOrder) {
  for (const uint64_t sequence : {3, 1, 2}) ASSERT_TRUE(Add(0, OneShot(sequence)).ok());
  ASSERT_TRUE(Add(0, OneShot(2, 0, 1)).ok());  // another chunk
  EXPECT_EQ(engine_.open_rounds(), 4u);
  for (const uint64_t sequence : {2, 3, 1}) {
    const auto added = Add(1, OneShot(sequence));
    ASSERT_TRUE(added.ok() && added->completed) << added.status();
    EXPECT_EQ(added->completed->id, OneShot(sequence));
    EXPECT_THAT(added->completed->nodes, ElementsAre(0, 1));
  }
  EXPECT_EQ(engine_.Oldest()->id, OneShot(2, 0, 1));
}

TEST_F(OneShotTest, NodesThatCallSomethingElseAreRefusedNamingBothCalls) {
  const auto add = [&](uint32_t node, uint64_t call) {
    Contribution share = ShareOf(OneShot(1), kSum, 1);
    share.settings = call;
    return engine_.Add(node, share, kStart);
  };
  ASSERT_TRUE(add(0, CallOf(CollectiveKind::kReduce, 1)).ok());
  EXPECT_EQ(
      add(1, CallOf(CollectiveKind::kReduce, 0)).status().message(),
      "collective 1 of group 0 chunk 0: node 1 says its call is reduce at root 0, node 0 says "
      "reduce at root 1");
  EXPECT_THAT(std::string(add(1, CallOf(CollectiveKind::kAllReduce, 0)).status().message()),
              HasSubstr("its call is allreduce, node 0"));
  EXPECT_THAT(std::string(add(1, ~uint64_t{0}).status().message()), HasSubstr("is call 184467"));
  EXPECT_TRUE(add(1, CallOf(CollectiveKind::kReduce, 1)).ok());
}

TEST_F(OneShotTest, GroupsNumberTheirRoundsForThemselves) {
  ASSERT_TRUE(engine_.SetGroup({1, {{0, 1}, {1, 1}}, 2}).ok());
  ASSERT_TRUE(Add(0, OneShot(1)).ok());
  EXPECT_EQ(Add(1, OneShot(1, 1))->verdict, Verdict::kHeld);
  EXPECT_EQ(engine_.open_rounds(), 2u);
  EXPECT_EQ(Add(1, OneShot(1))->verdict, Verdict::kCompleted);
}

TEST_F(OneShotTest, RepeatIsRecognisedWhileTheRoundIsOpen) {
  ASSERT_TRUE(Add(0, OneShot(1)).ok());
  EXPECT_EQ(Add(0, OneShot(1))->verdict, Verdict::kDuplicate);
}

TEST_F(OneShotTest, RepeatIsRecognisedBeforeAllNodesHaveSettled) {
  Complete(1);
  Complete(2);
  EXPECT_EQ(engine_.unsettled_runs(), 2u);
  EXPECT_EQ(Add(0, OneShot(1))->verdict, Verdict::kStale);
  ASSERT_EQ(Add(0, OneShot(3), 2)->verdict, Verdict::kHeld);
  EXPECT_EQ(engine_.unsettled_runs(), 2u);  // node 1 may still repeat them
  EXPECT_EQ(Add(1, OneShot(2))->verdict, Verdict::kStale);
}

TEST_F(OneShotTest, RepeatIsRecognisedAfterAllNodesHaveSettledWithoutItsName) {
  Complete(1);
  Complete(2);
  Complete(3, 2);
  EXPECT_EQ(engine_.unsettled_runs(), 1u);
  EXPECT_EQ(Add(0, OneShot(1))->verdict, Verdict::kStale);
  EXPECT_EQ(Add(1, OneShot(2))->verdict, Verdict::kStale);
  EXPECT_EQ(engine_.open_rounds(), 0u);
}

TEST_F(OneShotTest, ContributionsToBucketsSettleToo) {
  Complete(1);
  for (uint32_t node = 0; node < 2; ++node) {
    Contribution share = Share({{5, 0}, 0, 1}, 1);
    share.settled = 1;
    ASSERT_TRUE(engine_.Add(node, share, kStart).ok());
  }
  EXPECT_EQ(engine_.unsettled_runs(), 0u);
}

TEST_F(OneShotTest, LostNodeNeedNotSettle) {
  Complete(1);
  ASSERT_TRUE(Add(0, OneShot(2), 1).ok());
  EXPECT_EQ(engine_.unsettled_runs(), 1u);
  EXPECT_EQ(engine_.Remove(1, kStart).completed.size(), 1u);  // the second one
  EXPECT_EQ(engine_.unsettled_runs(), 1u);
  EXPECT_EQ(Add(0, OneShot(1))->verdict, Verdict::kStale);
}

TEST_F(OneShotTest, RoundOfAnotherGroupThanTheContributionNamesIsRefused) {
  Contribution other = ShareOf(OneShot(1, 1), kSum, 1, 0);
  const auto added = engine_.Add(0, other, kStart);
  EXPECT_TRUE(absl::IsInvalidArgument(added.status()));
  EXPECT_THAT(std::string(added.status().message()),
              HasSubstr("collective 1 of group 1 chunk 0: node 0 contributes to it in group 0"));
}

TEST_F(OneShotTest, RoundThatItsNodeSaysItHasIsRefused) {
  EXPECT_TRUE(absl::IsInvalidArgument(Add(0, OneShot(2), 2).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(Add(0, OneShot(0)).status()));
}

TEST_F(OneShotTest, NothingOfTenThousandRoundsStays) {
  const RoundId bucket{{5, 0}, 0, 1};
  ASSERT_TRUE(engine_.Add(0, Share(bucket, 1), kStart).ok());
  for (uint64_t sequence = 1; sequence <= 10'000; ++sequence) {
    Complete(sequence, sequence - 1);
    ASSERT_EQ(engine_.unsettled_runs(), 1u);
    ASSERT_EQ(engine_.open_rounds(), 1u);
    ASSERT_EQ(engine_.held_bytes(), sizeof(float));
  }
  EXPECT_TRUE(engine_.Add(1, Share(bucket, 1), kStart)->completed);
}

TEST_F(OneShotTest, ChunksOfACollectiveTakeOnePlaceOfThoseThatAreKept) {
  for (uint32_t chunk = 0; chunk < 5000; ++chunk) {
    ASSERT_EQ(Add(0, OneShot(1, 0, chunk))->verdict, Verdict::kHeld);
    ASSERT_EQ(Add(1, OneShot(1, 0, chunk))->verdict, Verdict::kCompleted);
  }
  EXPECT_EQ(Add(0, OneShot(1, 0, 7))->verdict, Verdict::kStale);
  EXPECT_EQ(engine_.unsettled_runs(), 1u);
}

TEST_F(OneShotTest, RoundsThatANodeNeverSettlesAreBounded) {
  uint64_t sequence = 1;
  for (; sequence <= RoundEngine::kMaxUnsettled; ++sequence) Complete(sequence);
  const auto added = Add(0, OneShot(sequence));
  EXPECT_TRUE(absl::IsResourceExhausted(added.status()));
  EXPECT_THAT(std::string(added.status().message()), HasSubstr("group 0 has settled all up to 0"));
}

}  // namespace
}  // namespace thalweg::one_shot_test
