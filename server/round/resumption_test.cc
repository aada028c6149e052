#include "server/round/resumption.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/base/protocol.h"

namespace thalweg::resumption_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr BucketId kBucket{3, 1, 0};

RoundResult Result(RoundId id) { return {id, 1, WireFormat::kFloat32, 1, 3, 0, Payload()}; }

std::string MessageOf(const absl::Status& status) { return std::string(status.message()); }

TEST(ResumptionTest, NodesWithTheSameRoundsLackNothing) {
  Resumption all;
  for (uint32_t node = 0; node < 3; ++node) {
    ASSERT_TRUE(all.Add(node, {{kBucket, {7, 0, 6}}, {{4, 0, 2}, {1}}}).ok());
  }
  const auto complete = all.Settle(3);
  ASSERT_TRUE(complete.ok()) << complete.status();
  EXPECT_THAT(*complete, ElementsAre(RoundId{kBucket, 0, 7}, RoundId{kBucket, 2, 6},
                                     RoundId{{4, 0, 2}, 0, 1}));
  EXPECT_EQ(all.num_missing(), 0u);
  for (uint32_t node = 0; node < 3; ++node) EXPECT_THAT(all.WantedFrom(node), IsEmpty());
  std::optional<RoundResult> result;
  EXPECT_FALSE(all.Ask(0, {kBucket, 0, 7}, &result));
}

TEST(ResumptionTest, LowestNodeWithAResultSuppliesItToThoseThatAsk) {
  Resumption all;
  ASSERT_TRUE(all.Add(2, {{kBucket, {5, 8}}}).ok());
  ASSERT_TRUE(all.Add(0, {{kBucket, {5, 7}}}).ok());
  ASSERT_TRUE(all.Add(1, {{kBucket, {5, 8}}}).ok());
  ASSERT_TRUE(all.Add(3, {{kBucket, {5, 7}}}).ok());
  const auto complete = all.Settle(4);
  ASSERT_TRUE(complete.ok()) << complete.status();
  EXPECT_THAT(*complete, ElementsAre(RoundId{kBucket, 0, 5}, RoundId{kBucket, 1, 8}));
  EXPECT_THAT(all.WantedFrom(0), IsEmpty());
  EXPECT_THAT(all.WantedFrom(1), ElementsAre(BucketRounds{kBucket, {0, 8}}));
  EXPECT_THAT(all.WantedFrom(2), IsEmpty());

  const RoundId id{kBucket, 1, 8};
  std::optional<RoundResult> result;
  EXPECT_FALSE(all.Ask(0, {kBucket, 1, 9}, &result));  // the next round is for the engine
  EXPECT_TRUE(all.Ask(0, id, &result));
  EXPECT_FALSE(result);
  EXPECT_TRUE(all.Ask(0, id, &result));  // a repetition counts once
  const auto asked = all.Supply(1, Result(id));
  ASSERT_TRUE(asked.ok()) << asked.status();
  EXPECT_THAT(*asked, ElementsAre(0u));
  EXPECT_TRUE(all.Ask(3, id, &result));
  ASSERT_TRUE(result);
  EXPECT_EQ(result->id, id);
  EXPECT_EQ(all.num_missing(), 0u);
}

TEST(ResumptionTest, NodeWithoutAnyRoundLacksTheFirstResult) {
  Resumption all;
  ASSERT_TRUE(all.Add(0, {{kBucket, {1}}}).ok());
  ASSERT_TRUE(all.Add(1, {}).ok());
  ASSERT_TRUE(all.Settle(2).ok());
  EXPECT_THAT(all.WantedFrom(0), ElementsAre(BucketRounds{kBucket, {1}}));
}

TEST(ResumptionTest, ResultThatIsNotWantedIsRefused) {
  Resumption all;
  ASSERT_TRUE(all.Add(0, {{kBucket, {2}}}).ok());
  ASSERT_TRUE(all.Add(1, {{kBucket, {2}}}).ok());
  ASSERT_TRUE(all.Add(2, {{kBucket, {1}}}).ok());
  ASSERT_TRUE(all.Settle(3).ok());
  const auto code = [&](uint32_t node, RoundId id) {
    return all.Supply(node, Result(id)).status();
  };
  EXPECT_TRUE(absl::IsFailedPrecondition(code(1, {kBucket, 0, 2})));  // node 0 is to supply it
  EXPECT_TRUE(absl::IsFailedPrecondition(code(0, {kBucket, 0, 3})));
  EXPECT_TRUE(absl::IsFailedPrecondition(code(0, {kBucket, 1, 2})));
  EXPECT_TRUE(code(0, {kBucket, 0, 2}).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(code(0, {kBucket, 0, 2})));
}

TEST(ResumptionTest, NodesMoreThanOneRoundApartAreNamed) {
  Resumption all;
  ASSERT_TRUE(all.Add(0, {{kBucket, {4, 9}}}).ok());
  ASSERT_TRUE(all.Add(1, {{kBucket, {4, 7}}}).ok());
  const absl::Status refused = all.Settle(2).status();
  EXPECT_TRUE(absl::IsDataLoss(refused));
  EXPECT_THAT(MessageOf(refused), HasSubstr("node 0 resumes with round 9 of chunk 1 of bucket 3 "
                                            "(layout 1), node 1 with round 7"));

  Resumption absent;
  ASSERT_TRUE(absent.Add(0, {{kBucket, {2}}}).ok());
  ASSERT_TRUE(absent.Add(1, {}).ok());
  EXPECT_TRUE(absl::IsDataLoss(absent.Settle(2).status()));
}

TEST(ResumptionTest, EarlierLayoutCountsUntilALaterOneHasAResult) {
  const BucketId later{3, 2, 0};
  Resumption both;  // node 1 forgot the earlier layout with its first result of the later one
  ASSERT_TRUE(both.Add(0, {{kBucket, {9}}}).ok());
  ASSERT_TRUE(both.Add(1, {{later, {1}}}).ok());
  const auto complete = both.Settle(2);
  ASSERT_TRUE(complete.ok()) << complete.status();
  EXPECT_THAT(*complete, ElementsAre(RoundId{later, 0, 1}));

  Resumption earlier;
  ASSERT_TRUE(earlier.Add(0, {{kBucket, {9}}}).ok());
  ASSERT_TRUE(earlier.Add(1, {{kBucket, {8}}}).ok());
  ASSERT_TRUE(earlier.Settle(2).ok());
  EXPECT_EQ(earlier.num_missing(), 1u);
}

TEST(ResumptionTest, WhatNodesSayIsBounded) {
  Resumption all;
  const std::vector<uint64_t> many(kMaxResumedChunks, 1);
  EXPECT_TRUE(absl::IsInvalidArgument(all.Add(0, {{kBucket, many}})));
  EXPECT_TRUE(absl::IsInvalidArgument(all.Add(1, {{{0, 0, kMaxParts}, {1}}})));
  EXPECT_TRUE(absl::IsInvalidArgument(all.Add(2, {{kBucket, {1}}, {kBucket, {1}}})));

  // Together, too: each names another bucket.
  Resumption together;
  const std::vector<uint64_t> half(kMaxResumedChunks / 2 + 1, 1);
  EXPECT_TRUE(together.Add(0, {{{0, 0, 0}, half}}).ok());
  EXPECT_GE(together.bytes(), half.size() * 64);
  EXPECT_TRUE(absl::IsInvalidArgument(together.Add(1, {{{1, 0, 0}, half}})));
}

TEST(ResumptionTest, RestartedNodeMayLackAllResultsOfABucket) {
  Resumption all;
  ASSERT_TRUE(all.Add(0, {{kBucket, std::vector<uint64_t>(1000, 2)}}).ok());
  ASSERT_TRUE(all.Add(1, {{kBucket, std::vector<uint64_t>(1000, 1)}}).ok());
  ASSERT_TRUE(all.Settle(2).ok());
  EXPECT_EQ(all.num_missing(), 1000u);
}

TEST(ResumptionTest, NodeThatHasWhatOthersLackMayBeLostOnceItHasSuppliedIt) {
  Resumption all;
  ASSERT_TRUE(all.Add(0, {{kBucket, {2}}}).ok());
  ASSERT_TRUE(all.Add(1, {{kBucket, {1}}}).ok());
  ASSERT_TRUE(all.Settle(2).ok());
  EXPECT_TRUE(all.CheckMayLose(1).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(all.CheckMayLose(0)));
  ASSERT_TRUE(all.Supply(0, Result({kBucket, 0, 2})).ok());
  EXPECT_TRUE(all.CheckMayLose(0).ok());
}

TEST(ResumptionTest, ResultThatOnlyLostNodesLackIsForgottenTwoRoundsLater) {
  Resumption all;
  ASSERT_TRUE(all.Add(0, {{kBucket, {2}}}).ok());
  ASSERT_TRUE(all.Add(1, {{kBucket, {1}}}).ok());
  ASSERT_TRUE(all.Settle(2).ok());
  std::optional<RoundResult> result;
  ASSERT_TRUE(all.Supply(0, Result({kBucket, 0, 2})).ok());
  EXPECT_FALSE(all.Ask(0, {kBucket, 0, 3}, &result));
  EXPECT_EQ(all.num_missing(), 1u);
  EXPECT_FALSE(all.Ask(0, {kBucket, 0, 4}, &result));
  EXPECT_EQ(all.num_missing(), 0u);
}

}  // namespace
}  // namespace thalweg::resumption_test
