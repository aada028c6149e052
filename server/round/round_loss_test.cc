// These tests remove lost nodes from a RoundEngine.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "server/round/fold.h"
#include "server/round/round_engine.h"
#include "server/round/round_test_util.h"

namespace thalweg::round_loss_test {
namespace {

using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Verdict = RoundEngine::Verdict;

constexpr TimePoint kStart{};
constexpr RoundId kId{{3, 0}, 0, 1};
constexpr Collective kBroadcast{Place::One(1), Place::All(), Fold::kNone};

// Node k has k + 1 workers.
class RoundLossTest : public ::testing::Test {
 protected:
  RoundEngine engine_{{1, 3, 8, seconds(10), {1, 2, 3}}};
};

TEST_F(RoundLossTest, MeanIsOverTheRemainingWorkersInRoundsAfterTheLoss) {
  for (uint32_t node = 0; node < 3; ++node)
    ASSERT_TRUE(engine_.Add(node, Share(kId, 1), kStart).ok());
  EXPECT_THAT(engine_.Remove(1, kStart).completed, IsEmpty());
  const RoundId next{{3, 0}, 0, 2};
  ASSERT_EQ(engine_.Add(2, Share(next, 6), kStart)->verdict, Verdict::kHeld);
  EXPECT_THAT(engine_.Oldest()->missing, ElementsAre(0));
  const auto added = engine_.Add(0, Share(next, 2), kStart);
  ASSERT_TRUE(added.ok() && added->completed) << added.status();
  EXPECT_THAT(added->completed->nodes, ElementsAre(0, 2));
  EXPECT_THAT(added->completed->results, ElementsAre(0, 2));
  EXPECT_EQ(ResultOf(*added->completed), 5);  // (1 × 2 + 3 × 6) / 4
  EXPECT_EQ(FoldRound(*added->completed, 1, nullptr)->workers, 4u);
}

TEST_F(RoundLossTest, OpenRoundThatLacksOnlyTheLostNodeCompletesWithTheRest) {
  const RoundId other{{4, 0}, 0, 1};
  ASSERT_TRUE(engine_.Add(0, Share(kId, 2), kStart).ok());
  ASSERT_TRUE(engine_.Add(2, Share(kId, 6), kStart + seconds(1)).ok());
  ASSERT_TRUE(engine_.Add(0, Share(other, 1), kStart).ok());
  const RoundEngine::Removed removed = engine_.Remove(1, kStart + seconds(3));
  ASSERT_EQ(removed.completed.size(), 1u);
  EXPECT_EQ(removed.completed[0].id, kId);
  EXPECT_EQ(ResultOf(removed.completed[0]), 5);
  EXPECT_EQ(removed.completed[0].open, seconds(3));
  EXPECT_THAT(removed.impossible, IsEmpty());
  EXPECT_EQ(engine_.open_rounds(), 1u);
  EXPECT_TRUE(engine_.Add(2, Share(other, 1), kStart)->completed);
  EXPECT_EQ(engine_.held_bytes(), 0u);
}

TEST_F(RoundLossTest, WhatTheLostNodeHasContributedCounts) {
  ASSERT_TRUE(engine_.Add(1, Share(kId, 4), kStart).ok());
  ASSERT_TRUE(engine_.Add(0, Share(kId, 2), kStart).ok());
  EXPECT_THAT(engine_.Remove(1, kStart).completed, IsEmpty());
  EXPECT_THAT(engine_.Oldest()->missing, ElementsAre(2));
  const auto added = engine_.Add(2, Share(kId, 6), kStart);
  ASSERT_TRUE(added.ok() && added->completed) << added.status();
  EXPECT_THAT(added->completed->nodes, ElementsAre(0, 1, 2));
  EXPECT_THAT(added->completed->results, ElementsAre(0, 2));
  EXPECT_NEAR(ResultOf(*added->completed), 28.0 / 6, 1e-6);  // (1 × 2 + 2 × 4 + 3 × 6) / 6
  EXPECT_EQ(engine_.held_bytes(), 0u);
}

TEST_F(RoundLossTest, SeveralLostNodesLeaveTheRest) {
  ASSERT_TRUE(engine_.Add(0, Share(kId, 2), kStart).ok());
  EXPECT_THAT(engine_.Remove(1, kStart).completed, IsEmpty());
  EXPECT_THAT(engine_.Remove(1, kStart).completed, IsEmpty());
  const RoundEngine::Removed removed = engine_.Remove(2, kStart);
  ASSERT_EQ(removed.completed.size(), 1u);
  EXPECT_EQ(ResultOf(removed.completed[0]), 2);
}

TEST_F(RoundLossTest, LostNodeContributesNoMore) {
  engine_.Remove(1, kStart);
  const auto added = engine_.Add(1, Share(kId, 1), kStart);
  EXPECT_TRUE(absl::IsFailedPrecondition(added.status()));
  EXPECT_THAT(std::string(added.status().message()), HasSubstr("goes on without node 1"));
  EXPECT_FALSE(engine_.OldestWaitingFor(1));
}

TEST_F(RoundLossTest, RoundWhoseOnlySourceIsLostIsDroppedAndNamed) {
  ASSERT_TRUE(engine_.Add(0, Ready(kId, kBroadcast), kStart).ok());
  const RoundEngine::Removed removed = engine_.Remove(1, kStart);
  EXPECT_THAT(removed.completed, IsEmpty());
  ASSERT_EQ(removed.impossible.size(), 1u);
  EXPECT_EQ(removed.impossible[0].id, kId);
  EXPECT_THAT(removed.impossible[0].missing, ElementsAre(2));
  EXPECT_EQ(engine_.open_rounds(), 0u);
  const auto added = engine_.Add(2, Ready(kId, kBroadcast), kStart);
  EXPECT_TRUE(absl::IsFailedPrecondition(added.status()));
}

TEST_F(RoundLossTest, BytesOfALostSourceStillPass) {
  ASSERT_TRUE(engine_.Add(1, ShareOf(kId, kBroadcast, 8), kStart).ok());
  ASSERT_TRUE(engine_.Add(0, Ready(kId, kBroadcast), kStart).ok());
  EXPECT_THAT(engine_.Remove(1, kStart).impossible, IsEmpty());
  const auto added = engine_.Add(2, Ready(kId, kBroadcast), kStart);
  ASSERT_TRUE(added.ok() && added->completed) << added.status();
  EXPECT_EQ(ResultOf(*added->completed), 8);
  EXPECT_THAT(added->completed->results, ElementsAre(0, 2));
}

TEST_F(RoundLossTest, AllGroupsGoOnWithoutTheLostNode) {
  ASSERT_TRUE(engine_.SetGroup({1, {{0, 1}, {1, 2}}, 2}).ok());
  ASSERT_TRUE(engine_.Add(0, ShareOf(kId, kMeanOfAll, 3, 1), kStart).ok());
  ASSERT_EQ(engine_.Remove(1, kStart).completed.size(), 1u);
  // A group that is declared afterwards begins without it.
  ASSERT_TRUE(engine_.SetGroup({2, {{1, 2}, {2, 3}}, 2}).ok());
  EXPECT_TRUE(engine_.Add(2, ShareOf({{4, 0}, 0, 1}, kMeanOfAll, 3, 2), kStart)->completed);
}

}  // namespace
}  // namespace thalweg::round_loss_test
