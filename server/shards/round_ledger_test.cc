#include "server/shards/round_ledger.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace thalweg::round_ledger_test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr BucketId kBucket{2, 0, 0};

Payload Bytes(size_t count) {
  const auto bytes = std::make_shared<const std::string>(count, 'x');
  return Payload(std::as_bytes(std::span(*bytes)), bytes);
}
Contribution Share(RoundId id) { return {id, 1, WireFormat::kFloat32, 1, Bytes(4)}; }
RoundResult Mean(RoundId id, size_t bytes = 4) {
  return {id, 1, WireFormat::kFloat32, 1, 2, 0, Bytes(bytes)};
}

class RoundLedgerTest : public ::testing::Test {
 protected:
  bool Answer(RoundId id, size_t bytes = 4) {
    RoundLedger::Replaced replaced;
    return ledger_.NoteResult(Mean(id, bytes), &replaced);
  }
  void Round(RoundId id, size_t bytes = 4) {
    ledger_.NoteContribution(Share(id));
    ASSERT_TRUE(Answer(id, bytes));
  }

  RoundLedger ledger_;
};

TEST_F(RoundLedgerTest, OneShotRoundsAreOpenUntilTheirResultAndLeaveNothing) {
  const RoundId first{OneShotsOf(3), 0, 1}, second{OneShotsOf(3), 0, 2};
  ledger_.NoteContribution(Share(first));
  ledger_.NoteContribution(Share(second));
  EXPECT_EQ(ledger_.num_open_one_shots(), 2u);
  EXPECT_TRUE(Answer(second));
  EXPECT_FALSE(Answer(second));
  EXPECT_TRUE(Answer(first));
  EXPECT_EQ(ledger_.num_open_one_shots(), 0u);
  EXPECT_EQ(ledger_.result_bytes(), 0u);
  EXPECT_THAT(ledger_.Completed(), IsEmpty());
  EXPECT_THAT(ledger_.Unanswered(), IsEmpty());
}

TEST_F(RoundLedgerTest, ContributionWaitsForItsResultOnly) {
  ledger_.NoteContribution(Share({kBucket, 1, 5}));
  EXPECT_FALSE(Answer({kBucket, 1, 4}));
  EXPECT_FALSE(Answer({kBucket, 0, 5}));
  ASSERT_EQ(ledger_.Unanswered().size(), 1u);
  EXPECT_TRUE(Answer({kBucket, 1, 5}));
  EXPECT_FALSE(Answer({kBucket, 1, 5}));  // once
  EXPECT_THAT(ledger_.Unanswered(), IsEmpty());
  EXPECT_THAT(ledger_.Completed(), ElementsAre(BucketRounds{kBucket, {0, 5}}));
}

TEST_F(RoundLedgerTest, LastResultOfEachChunkIsKept) {
  Round({kBucket, 0, 1}, 100);
  Round({kBucket, 0, 2}, 30);
  Round({kBucket, 3, 1}, 7);
  EXPECT_EQ(ledger_.result_bytes(), 37u);
  const auto results = ledger_.Results({{kBucket, {2, 0, 0, 1}}});
  ASSERT_TRUE(results.ok()) << results.status();
  ASSERT_EQ(results->size(), 2u);
  EXPECT_EQ((*results)[0].payload.SizeBytes(), 30u);
  EXPECT_EQ((*results)[1].id, (RoundId{kBucket, 3, 1}));
  EXPECT_TRUE(absl::IsInvalidArgument(ledger_.Results({{kBucket, {1}}}).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(ledger_.Results({{{9, 0, 0}, {1}}}).status()));
}

TEST_F(RoundLedgerTest, EarlierLayoutIsForgottenWithTheFirstResultOfTheNext) {
  const BucketId later{2, 1, 0};
  ledger_.NoteBucket({kBucket, {}});
  Round({kBucket, 0, 8}, 100);
  ledger_.NoteBucket({later, {}});
  ledger_.NoteContribution(Share({later, 0, 1}));
  ASSERT_EQ(ledger_.Buckets().size(), 1u);
  EXPECT_EQ(ledger_.Buckets()[0].id, later);
  // Another node may still lack it.
  EXPECT_THAT(ledger_.Completed(), ElementsAre(BucketRounds{kBucket, {8}}));
  ASSERT_TRUE(Answer({later, 0, 1}, 5));
  EXPECT_THAT(ledger_.Completed(), ElementsAre(BucketRounds{later, {1}}));
  EXPECT_EQ(ledger_.result_bytes(), 5u);
}

TEST_F(RoundLedgerTest, PayloadsAreHandedToTheCaller) {
  Round({kBucket, 0, 1});
  ledger_.NoteContribution(Share({kBucket, 0, 2}));
  RoundLedger::Replaced replaced;
  ASSERT_TRUE(ledger_.NoteResult(Mean({kBucket, 0, 2}), &replaced));
  ASSERT_TRUE(replaced.contribution);
  EXPECT_EQ(replaced.contribution->id.round, 2u);
  ASSERT_EQ(replaced.results.size(), 1u);
  EXPECT_EQ(replaced.results[0].id.round, 1u);
}

}  // namespace
}  // namespace thalweg::round_ledger_test
