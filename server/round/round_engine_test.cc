#include "server/round/round_engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/round/round_test_util.h"

namespace thalweg::round_engine_test {
namespace {

using ::testing::ElementsAre;
using Verdict = RoundEngine::Verdict;

constexpr TimePoint kStart{};

RoundEngine Engine(uint32_t nodes, uint32_t window = 8) {
  return RoundEngine({1, nodes, window, std::chrono::seconds(10)});
}

TEST(RoundEngineTest, CompletesWithLastContributionInNodeOrderWhateverTheArrival) {
  RoundEngine engine = Engine(3);
  EXPECT_EQ(engine.Add(2, Share({{0, 0}, 0, 1}, 2), kStart)->verdict, Verdict::kHeld);
  EXPECT_EQ(engine.Add(0, Share({{0, 0}, 0, 1}, 0), kStart)->verdict, Verdict::kHeld);
  auto added = engine.Add(1, Share({{0, 0}, 0, 1}, 1), kStart);
  ASSERT_TRUE(added.ok());
  ASSERT_EQ(added->verdict, Verdict::kCompleted);
  const auto& payloads = added->completed->payloads;
  ASSERT_EQ(payloads.size(), 3u);
  for (int node = 0; node < 3; ++node) EXPECT_EQ(ValueOf(payloads[node]), node);
  EXPECT_EQ(engine.open_rounds(), 0u);
  EXPECT_EQ(engine.held_bytes(), 0u);
}

TEST(RoundEngineTest, HoldsAtMostAWindowOfEachNodeAndPart) {
  RoundEngine engine = Engine(3, 8);
  EXPECT_EQ(engine.max_held(), 3u * 8);
  engine.AllowPart(2);
  EXPECT_EQ(engine.max_held(), 3u * 8 * 2);
}

TEST(RoundEngineTest, DuplicateCountsOnceAndFirstOneWins) {
  RoundEngine engine = Engine(2);
  ASSERT_TRUE(engine.Add(0, Share({{0, 0}, 0, 1}, 5), kStart).ok());
  EXPECT_EQ(engine.Add(0, Share({{0, 0}, 0, 1}, 6), kStart)->verdict, Verdict::kDuplicate);
  auto added = engine.Add(1, Share({{0, 0}, 0, 1}, 7), kStart);
  EXPECT_EQ(ValueOf(added->completed->payloads[0]), 5);
}

TEST(RoundEngineTest, RoundSaysHowLongItWasOpenAndHowLongOneWasMissing) {
  RoundEngine engine = Engine(3);
  const auto at = [](int ms) { return kStart + std::chrono::milliseconds(ms); };
  ASSERT_TRUE(engine.Add(1, Share({{0, 0}, 0, 1}, 1), at(0)).ok());
  ASSERT_TRUE(engine.Add(0, Share({{0, 0}, 0, 1}, 1), at(4)).ok());
  ASSERT_TRUE(engine.Add(0, Share({{0, 0}, 0, 1}, 1), at(6)).ok());  // a duplicate
  const auto added = engine.Add(2, Share({{0, 0}, 0, 1}, 1), at(9));
  ASSERT_TRUE(added->completed);
  EXPECT_EQ(added->completed->open, std::chrono::milliseconds(9));
  EXPECT_EQ(added->completed->missing_one, std::chrono::milliseconds(5));
}

TEST(RoundEngineTest, OldestIsTheRoundThatOpenedFirst) {
  RoundEngine engine = Engine(2);
  EXPECT_FALSE(engine.Oldest());
  const auto second = std::chrono::seconds(1);
  ASSERT_TRUE(engine.Add(0, Share({{1, 0}, 0, 1}, 1), kStart + second).ok());
  ASSERT_TRUE(engine.Add(1, Share({{2, 0}, 0, 1}, 1), kStart).ok());
  ASSERT_TRUE(engine.Add(0, Share({{3, 0}, 0, 1}, 1), kStart + 2 * second).ok());
  ASSERT_TRUE(engine.Oldest());
  EXPECT_EQ(engine.Oldest()->id.bucket.index, 2u);
  EXPECT_THAT(engine.Oldest()->missing, ElementsAre(0u));
}

TEST(RoundEngineTest, LateContributionIsStaleAndNotSummed) {
  RoundEngine engine = Engine(1);
  EXPECT_EQ(engine.Add(0, Share({{0, 0}, 0, 1}, 1), kStart)->verdict, Verdict::kCompleted);
  EXPECT_EQ(engine.Add(0, Share({{0, 0}, 0, 1}, 1), kStart)->verdict, Verdict::kStale);
  EXPECT_EQ(engine.open_rounds(), 0u);
}

TEST(RoundEngineTest, RoundFromTheFutureIsRefused) {
  RoundEngine engine = Engine(2);
  EXPECT_EQ(engine.Add(0, Share({{0, 0}, 0, 2}, 1), kStart).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(engine.open_rounds(), 0u);
}

TEST(RoundEngineTest, OtherEpochIsRefused) {
  RoundEngine engine = Engine(1);
  EXPECT_EQ(engine.Add(0, Share({{0, 0}, 0, 1}, 1, 2), kStart).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST(RoundEngineTest, WindowBoundsWhatOneNodeMakesTheShardHold) {
  RoundEngine engine = Engine(2, 3);
  for (uint32_t chunk = 0; chunk < 3; ++chunk) {
    ASSERT_TRUE(engine.Add(0, Share({{0, 0}, chunk, 1}, 1), kStart).ok());
  }
  EXPECT_EQ(engine.Add(0, Share({{0, 0}, 3, 1}, 1), kStart).status().code(),
            absl::StatusCode::kResourceExhausted);
  // A completed round frees its place in the window.
  ASSERT_EQ(engine.Add(1, Share({{0, 0}, 0, 1}, 1), kStart)->verdict, Verdict::kCompleted);
  EXPECT_TRUE(engine.Add(0, Share({{0, 0}, 3, 1}, 1), kStart).ok());
}

TEST(RoundEngineTest, ResultsThatANodeDoesNotTakeCountTowardsItsWindow) {
  RoundEngine engine = Engine(2, 3);
  ASSERT_TRUE(engine.Add(0, Share({{0, 0}, 0, 1}, 1), kStart, 2).ok());
  EXPECT_EQ(engine.Add(0, Share({{0, 0}, 1, 1}, 1), kStart, 2).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(engine.Add(0, Share({{0, 0}, 1, 1}, 1), kStart, 1).ok());
}

TEST(RoundEngineTest, ExpiredRoundNamesMissingNodes) {
  RoundEngine engine = Engine(4);
  ASSERT_TRUE(engine.Add(1, Share({{7, 0}, 2, 1}, 1), kStart).ok());
  ASSERT_TRUE(engine.Add(2, Share({{7, 0}, 2, 1}, 1), kStart + std::chrono::seconds(9)).ok());
  EXPECT_TRUE(engine.Expired(kStart + std::chrono::seconds(10)).empty());
  const auto expired = engine.Expired(kStart + std::chrono::seconds(11));
  ASSERT_EQ(expired.size(), 1u);
  EXPECT_EQ(expired[0].id, (RoundId{{7, 0}, 2, 1}));
  EXPECT_THAT(expired[0].missing, ElementsAre(0, 3));
}

TEST(RoundEngineTest, OldestWaitingForFindsTheLongestWait) {
  RoundEngine engine = Engine(2);
  ASSERT_TRUE(engine.Add(0, Share({{5, 0}, 0, 1}, 1), kStart + std::chrono::seconds(1)).ok());
  ASSERT_TRUE(engine.Add(0, Share({{9, 0}, 0, 1}, 1), kStart).ok());
  EXPECT_EQ(engine.OldestWaitingFor(1)->id.bucket.index, 9u);
  EXPECT_FALSE(engine.OldestWaitingFor(0).has_value());
}

TEST(RoundEngineTest, NewLayoutForgetsRoundsOfTheOldOne) {
  RoundEngine engine = Engine(2);
  ASSERT_TRUE(engine.Add(0, Share({{3, 0}, 0, 1}, 1), kStart).ok());
  ASSERT_TRUE(engine.Add(0, Share({{4, 0}, 0, 1}, 1), kStart).ok());
  EXPECT_EQ(engine.DropOlderLayouts({3, 1}), 1u);
  EXPECT_EQ(engine.open_rounds(), 1u);
  EXPECT_EQ(engine.held_bytes(), sizeof(float));
  EXPECT_EQ(engine.Add(0, Share({{3, 1}, 0, 1}, 1), kStart)->verdict, Verdict::kHeld);
}

}  // namespace
}  // namespace thalweg::round_engine_test
