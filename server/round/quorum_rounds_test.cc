#include "server/round/quorum_rounds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace thalweg::quorum_rounds_test {
namespace {

using std::chrono::milliseconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::testing::StartsWith;

constexpr BucketId kBucket{2, 0, 0};

// Returns e.g. "0:1 2:1 -> 0:1": the pushes that an update has, and whose rounds get the weights.
std::string Text(const CompleteRound& update) {
  std::vector<std::string> pushes, answers;
  for (size_t i = 0; i < update.nodes.size(); ++i) {
    pushes.push_back(absl::StrCat(update.nodes[i], ":", update.rounds[i]));
  }
  for (const auto& [node, round] : update.answers)
    answers.push_back(absl::StrCat(node, ":", round));
  return absl::StrCat(absl::StrJoin(pushes, " "), " -> ", absl::StrJoin(answers, " "));
}

class QuorumRoundsTest : public ::testing::Test {
 protected:
  static constexpr uint32_t kNodes = 3;

  void SetRule(uint32_t quorum, uint32_t grace_ms, bool drops_late = false) {
    UpdateRule rule;
    rule.quorum = quorum;
    rule.grace_ms = grace_ms;
    rule.drops_late = drops_late;
    rule_ = std::make_shared<const UpdateRule>(rule);
  }
  // Lets the node contribute its next round to the chunk.
  RoundEngine::Added Push(uint32_t node, uint32_t chunk = 0, UpdateStep settings = {}) {
    auto added = Try(node, ++numbers_[{node, chunk}], chunk, settings);
    EXPECT_TRUE(added.ok()) << added.status();
    return *std::move(added);
  }
  RoundEngine::Added End(uint32_t node, bool gives_nothing = false) {
    UpdateStep settings;
    settings.waits_for_all = true;
    settings.gives_nothing = gives_nothing;
    return Push(node, 0, settings);
  }
  absl::StatusOr<RoundEngine::Added> Try(uint32_t node, uint64_t round, uint32_t chunk = 0,
                                         const UpdateStep& settings = {}) {
    Contribution contribution{{kBucket, chunk, round}, 1, WireFormat::kFloat32, 4, Payload()};
    contribution.settings = settings_;
    return rounds_.Add({node, node + 1, window_}, std::move(contribution), rule_, settings, now_);
  }
  // Returns the updates whose grace is over after so long.
  std::vector<std::string> After(Duration time) {
    now_ += time;
    std::vector<std::string> texts;
    for (const CompleteRound& update : rounds_.Ripe(now_)) texts.push_back(Text(update));
    return texts;
  }
  // Lets the nodes come to an update one after the other, each so much later than the first, which
  // comes `period` after the last update. Returns after which time the update was complete.
  Duration Meet(std::vector<std::pair<uint32_t, Duration>> nodes, Duration period) {
    const TimePoint begin = now_ += period;
    Duration complete = Duration::max();
    for (const auto& [node, later] : nodes) {
      while (now_ < begin + later) {
        now_ += milliseconds(1);
        if (!rounds_.Ripe(now_).empty()) complete = std::min(complete, now_ - begin);
      }
      if (Push(node).completed) complete = std::min(complete, now_ - begin);
    }
    return complete;
  }

  std::shared_ptr<const UpdateRule> rule_;
  std::map<std::pair<uint32_t, uint32_t>, uint64_t> numbers_;
  uint64_t window_ = 8;
  uint64_t settings_ = 1;
  TimePoint now_{};
  QuorumRounds rounds_{kNodes};
};

TEST_F(QuorumRoundsTest, UpdateHasWhatIsThereWhenAllHaveContributedOrAQuorumAndTheGraceIsOver) {
  SetRule(2, 100);
  EXPECT_FALSE(Push(2).completed);
  EXPECT_THAT(After(milliseconds(1000)), IsEmpty()) << "one of three is no quorum of two";
  EXPECT_FALSE(Push(0).completed);
  EXPECT_THAT(After(milliseconds(99)), IsEmpty());
  EXPECT_THAT(After(milliseconds(1)), ElementsAre("0:1 2:1 -> 0:1 2:1"));

  Push(0);
  Push(2);
  EXPECT_THAT(After(milliseconds(0)), ElementsAre()) << "the missing one has been waited for";
}

TEST_F(QuorumRoundsTest, UpdateWithAllIsCompleteAtOnceInTheOrderOfNodesWithTheirWorkers) {
  SetRule(2, 100);
  Push(1);
  Push(2);
  const auto added = Push(0);
  ASSERT_TRUE(added.completed);
  EXPECT_EQ(added.verdict, RoundEngine::Verdict::kCompleted);
  EXPECT_EQ(Text(*added.completed), "0:1 1:1 2:1 -> 0:1 1:1 2:1");
  EXPECT_THAT(added.completed->workers, ElementsAre(1, 2, 3));
  EXPECT_EQ(added.completed->id, (RoundId{kBucket, 0, 1}));
}

TEST_F(QuorumRoundsTest, NodeThatComesLateIsAnsweredAtOnceAndCountsInTheNextUpdate) {
  SetRule(2, 0);
  Push(0);
  EXPECT_EQ(Text(*Push(1).completed), "0:1 1:1 -> 0:1 1:1");
  const auto late = Push(2);
  EXPECT_EQ(late.late.answer, 1u);
  EXPECT_EQ(late.late.updates, 1u);
  EXPECT_FALSE(late.completed);
  EXPECT_FALSE(Push(0).completed) << "what was late is none of a quorum";
  const auto added = Push(2);  // goes on from the weights that it has got
  EXPECT_EQ(added.late.updates, 0u);
  EXPECT_FALSE(added.late.answer);
  EXPECT_EQ(Text(*added.completed), "0:2 2:1 2:2 -> 0:2 2:2");
}

TEST_F(QuorumRoundsTest, UpdateHasTheSettingsOfANodeThatCameInTime) {
  SetRule(2, 0);
  Push(1);
  Push(2);
  EXPECT_TRUE(Push(0).late.answer);
  settings_ = 2;
  Push(1);
  EXPECT_EQ(Push(2).completed->settings, 2u);
}

TEST_F(QuorumRoundsTest, WhatIsLateIsDroppedWhereTheRuleSaysSo) {
  SetRule(2, 0, /*drops_late=*/true);
  Push(0);
  Push(1);
  const auto late = Push(2);
  EXPECT_EQ(late.late.answer, 1u);
  Push(0);
  EXPECT_EQ(Text(*Push(1).completed), "0:2 1:2 -> 0:2 1:2");
}

TEST_F(QuorumRoundsTest, ChunksOfOnePushWaitForAMissingNodeOnce) {
  SetRule(2, 100);
  for (uint32_t chunk = 0; chunk < 3; ++chunk) {
    Push(0, chunk);
    EXPECT_EQ(Push(1, chunk).completed.has_value(), chunk > 0);
    if (chunk == 0) EXPECT_THAT(After(milliseconds(100)), SizeIs(1));
  }
  // It is back: the next update waits for it again.
  Push(2, 0);
  Push(0, 1);
  EXPECT_FALSE(Push(1, 1).completed);
}

TEST_F(QuorumRoundsTest, MeasuredGraceWaitsForNodesThatAreUsuallyALittleLate) {
  SetRule(2, kMeasuredGrace);
  const auto ms = [](int n) { return milliseconds(n); };
  // The first update waits for all, because nothing is known of anybody.
  EXPECT_EQ(Meet({{0, ms(0)}, {1, ms(0)}, {2, ms(300)}}, ms(0)), ms(300));
  // Twice 300 ms is not more than an eighth of 5 s.
  EXPECT_EQ(Meet({{0, ms(0)}, {1, ms(0)}, {2, ms(400)}}, ms(5000)), ms(400));
  // It is gone: 2 * (300 + (400 - 300) / 4) ms after the quorum nobody waits any longer.
  EXPECT_EQ(Meet({{0, ms(0)}, {1, ms(10)}, {2, ms(3000)}}, ms(8000)), ms(10 + 650));
}

TEST_F(QuorumRoundsTest, MeasuredGraceDoesNotWaitForNodesThatAreAlwaysFarBehind) {
  SetRule(2, kMeasuredGrace);
  const auto ms = [](int n) { return milliseconds(n); };
  EXPECT_EQ(Meet({{0, ms(0)}, {1, ms(0)}, {2, ms(900)}}, ms(0)), ms(900));
  // Twice 900 ms is more than an eighth of a second.
  EXPECT_EQ(Meet({{0, ms(0)}, {1, ms(5)}, {2, ms(900)}}, ms(1000)), ms(5));
  EXPECT_EQ(Meet({{0, ms(0)}, {1, ms(5)}, {2, ms(900)}}, ms(1000)), ms(5));
}

TEST_F(QuorumRoundsTest, RoundOfAllWaitsForAllWhileOthersGoOnWithoutThoseThatEnd) {
  SetRule(2, 0);
  EXPECT_FALSE(End(0).completed);
  EXPECT_FALSE(Push(1).completed);
  EXPECT_EQ(Text(*Push(2).completed), "1:1 2:1 -> 1:1 2:1") << "all that do not end";
  EXPECT_FALSE(End(1).completed);
  EXPECT_EQ(Text(*Push(2).completed), "2:2 -> 2:2");
  const auto added = End(2, /*gives_nothing=*/true);
  EXPECT_EQ(Text(*added.completed), "0:1 1:2 -> 0:1 1:2 2:3");
  EXPECT_EQ(added.completed->id.round, 3u);
}

TEST_F(QuorumRoundsTest, NodesThatEndAreMissedInNoChunkThoughTheirWindowsKeepThemFromSayingSo) {
  SetRule(2, 0);
  Push(2, 0);
  Push(2, 1);
  EXPECT_FALSE(End(0).completed);
  EXPECT_THAT(After(milliseconds(0)), IsEmpty());
  EXPECT_EQ(Text(*End(1).completed), "2:1 -> 2:1");
  EXPECT_THAT(After(milliseconds(0)), ElementsAre("2:1 -> 2:1")) << "in the other chunk";
  // They train on: the next one waits for one of them again.
  End(2, true);
  Push(2, 1);
  EXPECT_THAT(After(milliseconds(1000)), IsEmpty());
}

TEST_F(QuorumRoundsTest, RoundOfAllInWhichNobodyGivesAnythingChangesNoWeights) {
  SetRule(2, 0);
  Push(0);
  Push(1);
  End(0, true);
  End(1, true);
  const auto added = End(2, true);
  EXPECT_EQ(Text(*added.completed), " -> 0:2 1:2 2:1");
  EXPECT_EQ(added.completed->id.round, 1u) << "the version that is there";
}

TEST_F(QuorumRoundsTest, WhatCameLateIsInTheRoundOfAll) {
  SetRule(2, 0);
  Push(0);
  Push(1);
  EXPECT_TRUE(Push(2).late.answer);
  End(0, true);
  End(1, true);
  EXPECT_EQ(Text(*End(2, true).completed), "2:1 -> 0:2 1:2 2:2");
}

TEST_F(QuorumRoundsTest, RepeatedContributionIsKnownAndOneThatSkipsARoundIsRefused) {
  SetRule(2, 0);
  Push(0);
  EXPECT_EQ(Try(0, 1)->verdict, RoundEngine::Verdict::kStale);
  EXPECT_EQ(Try(0, 3).status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(QuorumRoundsTest, NodeThatDoesNotWaitForItsAnswerIsRefused) {
  SetRule(2, 0);
  Push(0);
  const auto refused = Try(0, 2);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("waits for the answer"));
}

TEST_F(QuorumRoundsTest, NodeThatExceedsItsWindowIsRefused) {
  SetRule(2, 0);
  window_ = 2;
  Push(0, 0);
  Push(0, 1);
  const auto refused = Try(0, 1, 2);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("window of 2 chunks"));
  EXPECT_EQ(Try(0, 1, 1)->verdict, RoundEngine::Verdict::kStale) << "repeats need no place";
  Push(1, 0);
  EXPECT_TRUE(Try(0, 1, 2).ok()) << "the update has answered one";
}

TEST_F(QuorumRoundsTest, UpdatesGoOnWithoutANodeThatHasLeftAsLongAsThereIsAQuorum) {
  SetRule(2, 60'000);
  Push(0);
  Push(1);
  const auto removed = rounds_.Remove(2, now_);
  ASSERT_THAT(removed.completed, SizeIs(1));
  EXPECT_EQ(Text(removed.completed[0]), "0:1 1:1 -> 0:1 1:1");
  Push(0);
  const auto last = rounds_.Remove(1, now_);
  ASSERT_THAT(last.impossible, SizeIs(1));
  EXPECT_EQ(last.impossible[0].id, (RoundId{kBucket, 0, 2}));
  const auto refused = Try(0, 3);
  EXPECT_THAT(std::string(refused.status().message()),
              HasSubstr("needs a quorum of 2 nodes, and 1 are here"));
  EXPECT_TRUE(Try(0, 3, 0, {.waits_for_all = true}).ok()) << "it may end";
}

TEST_F(QuorumRoundsTest, RoundOfAllEndsThoughALostNodeHadPushedBeforeTheLastOneCame) {
  SetRule(2, 0);
  EXPECT_FALSE(End(1).completed);
  EXPECT_FALSE(Push(2).completed);
  EXPECT_THAT(rounds_.Remove(2, now_).completed, IsEmpty());
  EXPECT_EQ(Text(*End(0).completed), "2:1 -> 2:1");
  EXPECT_THAT(After(milliseconds(0)), ElementsAre("0:1 1:1 -> 0:1 1:1"));
}

TEST_F(QuorumRoundsTest, NodeThatWaitsTooLongForAQuorumIsTold) {
  SetRule(2, 0);
  Push(1);
  EXPECT_THAT(rounds_.Expired(now_ + milliseconds(1000), milliseconds(1000)), IsEmpty());
  const auto expired = rounds_.Expired(now_ + milliseconds(1001), milliseconds(1000));
  ASSERT_THAT(expired, SizeIs(1));
  EXPECT_EQ(expired[0].id, (RoundId{kBucket, 0, 1}));
  EXPECT_THAT(expired[0].missing, ElementsAre(0, 2));
}

TEST_F(QuorumRoundsTest, NewLayoutBeginsAnew) {
  SetRule(2, 0);
  Push(0);
  Push(1);
  rounds_.DropOlderLayouts({kBucket.index, 1, 0});
  EXPECT_EQ(Push(2).late.updates, 0u);
}

}  // namespace
}  // namespace thalweg::quorum_rounds_test
