#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "server/round/fold.h"
#include "server/round/round_engine.h"
#include "server/round/round_test_util.h"

namespace thalweg::round_collective_test {
namespace {

using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Verdict = RoundEngine::Verdict;

constexpr TimePoint kStart{};
constexpr RoundId kId{{3, 0}, 0, 1};
constexpr Collective kReduce{Place::All(), Place::One(2), Fold::kMax};
constexpr Collective kBroadcast{Place::One(1), Place::All(), Fold::kNone};
constexpr Collective kSend{Place::One(0), Place::One(2), Fold::kNone};
constexpr Collective kBarrier{Place::None(), Place::None(), Fold::kNone};

// Node k has k + 1 workers.
RoundEngine Engine(uint32_t nodes, uint32_t window = 8) {
  std::vector<uint32_t> workers;
  for (uint32_t node = 0; node < nodes; ++node) workers.push_back(node + 1);
  return RoundEngine({1, nodes, window, seconds(10), workers});
}

std::string MessageOf(const absl::StatusOr<RoundEngine::Added>& added) {
  return std::string(added.status().message());
}

TEST(RoundCollectiveTest, MeanOfAllGoesToAllOverTheirWorkers) {
  RoundEngine engine = Engine(3);
  for (const uint32_t node : {2, 0}) {
    ASSERT_EQ(engine.Add(node, Share(kId, 6), kStart)->verdict, Verdict::kHeld);
  }
  const auto added = engine.Add(1, Share(kId, 9), kStart);
  ASSERT_TRUE(added.ok() && added->completed) << added.status();
  const CompleteRound& round = *added->completed;
  EXPECT_THAT(round.nodes, ElementsAre(0, 1, 2));
  EXPECT_THAT(round.workers, ElementsAre(1, 2, 3));
  EXPECT_THAT(round.results, ElementsAre(0, 1, 2));
  EXPECT_THAT(round.receipts, IsEmpty());
  EXPECT_EQ(ResultOf(round), 7);
  EXPECT_EQ(FoldRound(round, 1, nullptr)->workers, 6u);
}

TEST(RoundCollectiveTest, ResultForOneGivesTheOthersAReceipt) {
  RoundEngine engine = Engine(3);
  for (uint32_t node = 0; node < 2; ++node) {
    ASSERT_EQ(engine.Add(node, ShareOf(kId, kReduce, 5 - 1.0f * node), kStart)->verdict,
              Verdict::kHeld);
  }
  const auto added = engine.Add(2, ShareOf(kId, kReduce, 1), kStart);
  ASSERT_TRUE(added.ok() && added->completed) << added.status();
  EXPECT_THAT(added->completed->results, ElementsAre(2));
  EXPECT_THAT(added->completed->receipts, ElementsAre(0, 1));
  EXPECT_EQ(ResultOf(*added->completed), 5);
}

TEST(RoundCollectiveTest, BytesOfOnePassToAllOnceTheOthersAreReady) {
  RoundEngine engine = Engine(3);
  ASSERT_TRUE(engine.Add(1, ShareOf(kId, kBroadcast, 8), kStart).ok());
  ASSERT_EQ(engine.Add(0, Ready(kId, kBroadcast), kStart)->verdict, Verdict::kHeld);
  const auto added = engine.Add(2, Ready(kId, kBroadcast), kStart);
  ASSERT_TRUE(added.ok() && added->completed) << added.status();
  const CompleteRound& round = *added->completed;
  EXPECT_THAT(round.nodes, ElementsAre(1));
  EXPECT_THAT(round.results, ElementsAre(0, 1, 2));
  const auto result = FoldRound(round, 1, nullptr);
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result->payload.owner, round.payloads[0].owner);  // not a copy
  EXPECT_EQ(result->workers, 2u);
}

TEST(RoundCollectiveTest, BytesOfOnePassToOneOther) {
  RoundEngine engine = Engine(3);
  ASSERT_TRUE(engine.Add(2, Ready(kId, kSend), kStart).ok());
  ASSERT_TRUE(engine.Add(1, Ready(kId, kSend), kStart).ok());
  const auto added = engine.Add(0, ShareOf(kId, kSend, 4), kStart);
  ASSERT_TRUE(added.ok() && added->completed) << added.status();
  EXPECT_THAT(added->completed->results, ElementsAre(2));
  EXPECT_THAT(added->completed->receipts, ElementsAre(0, 1));
  EXPECT_EQ(ResultOf(*added->completed), 4);
}

TEST(RoundCollectiveTest, BarrierGivesAllAReceiptWhenAllAreReady) {
  RoundEngine engine = Engine(2);
  ASSERT_EQ(engine.Add(0, Ready(kId, kBarrier), kStart)->verdict, Verdict::kHeld);
  const auto added = engine.Add(1, Ready(kId, kBarrier), kStart);
  ASSERT_TRUE(added.ok() && added->completed) << added.status();
  EXPECT_THAT(added->completed->results, IsEmpty());
  EXPECT_THAT(added->completed->receipts, ElementsAre(0, 1));
  const auto result = FoldRound(*added->completed, 1, nullptr);
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result->payload.SizeBytes(), 0u);
}

TEST(RoundCollectiveTest, NodeThatGivesWhatIsNotWantedIsNamedAndNothingChanges) {
  RoundEngine engine = Engine(3);
  const auto added = engine.Add(2, ShareOf(kId, kBroadcast, 1), kStart);
  EXPECT_TRUE(absl::IsInvalidArgument(added.status()));
  EXPECT_EQ(MessageOf(added),
            "bucket 3 round 1 chunk 0: node 2 contributes 4 bytes to 'bytes from node 1 to all', "
            "which wants nothing from it");
  EXPECT_EQ(engine.open_rounds(), 0u);
  EXPECT_EQ(engine.Add(2, Ready(kId, kBroadcast), kStart)->verdict, Verdict::kHeld);
}

TEST(RoundCollectiveTest, ContributionThatDiffersFromTheFirstIsRefusedNamingBothNodes) {
  RoundEngine engine = Engine(3);
  ASSERT_TRUE(engine.SetGroup({1, {{0, 1}, {2, 3}}, 2}).ok());
  ASSERT_TRUE(engine.Add(0, Share(kId, 1), kStart).ok());
  Contribution group = Share(kId, 1), collective = group, wire = group, elems = group;
  group.group = 1;
  collective.collective = kReduce;
  wire.wire = WireFormat::kFloat16;
  elems.elems = 2;
  const auto refused = [&](const Contribution& contribution) {
    const auto added = engine.Add(2, contribution, kStart);
    EXPECT_TRUE(absl::IsInvalidArgument(added.status()));
    return MessageOf(added);
  };
  const std::string of = "bucket 3 round 1 chunk 0: node 2 says its ";
  EXPECT_EQ(refused(group), of + "group is 1, node 0 says 0");
  EXPECT_EQ(refused(collective),
            of + "collective is max from all to node 2, node 0 says mean from all to all");
  EXPECT_EQ(refused(wire), of + "format is fp16, node 0 says fp32");
  EXPECT_EQ(refused(elems), of + "number of elements is 2, node 0 says 1");
  EXPECT_EQ(engine.held_bytes(), sizeof(float));
  EXPECT_EQ(engine.Add(2, Share(kId, 1), kStart)->verdict, Verdict::kHeld);
}

TEST(RoundCollectiveTest, CollectiveThatCannotBeIsRefused) {
  RoundEngine engine = Engine(3);
  const auto unknown =
      engine.Add(0, ShareOf(kId, {Place::All(), Place::All(), Fold::kNone}, 1), kStart);
  EXPECT_TRUE(absl::IsInvalidArgument(unknown.status()));
  ASSERT_TRUE(engine.SetGroup({1, {{0, 1}, {2, 3}}, 2}).ok());
  const auto outside = engine.Add(0, Ready(kId, kBroadcast, 1), kStart);
  EXPECT_TRUE(absl::IsInvalidArgument(outside.status()));
  EXPECT_THAT(MessageOf(outside), HasSubstr("in group 1, which has no such node"));
  EXPECT_EQ(engine.open_rounds(), 0u);
}

TEST(RoundCollectiveTest, FirstContributionSaysWhenTheRoundIsLate) {
  RoundEngine engine = Engine(2);
  Contribution patient = Share({{4, 0}, 0, 1}, 1), other = patient;
  patient.timeout = seconds(60);
  other.timeout = seconds(1);
  ASSERT_TRUE(engine.Add(0, Share(kId, 1), kStart).ok());  // the job's: 10 s
  ASSERT_TRUE(engine.Add(0, patient, kStart).ok());
  const auto soon = engine.Expired(kStart + seconds(11));
  ASSERT_EQ(soon.size(), 1u);
  EXPECT_EQ(soon[0].id, kId);
  EXPECT_EQ(soon[0].timeout, seconds(10));
  const auto late = engine.Expired(kStart + seconds(61));
  ASSERT_EQ(late.size(), 2u);
  EXPECT_EQ(late[1].timeout, seconds(60));
  EXPECT_TRUE(engine.Add(1, other, kStart)->completed);
}

TEST(RoundCollectiveTest, SubsetsDifferByBucketAndCompleteWithTheirNodes) {
  RoundEngine engine = Engine(4);
  ASSERT_TRUE(engine.SetGroup({1, {{0, 2}, {3, 4}}, 4}).ok());
  ASSERT_TRUE(engine.SetGroup({2, {{1, 1}, {2, 1}}, 4}).ok());
  const RoundId first{{0, 0}, 0, 1}, second{{1, 0}, 0, 1};
  ASSERT_TRUE(engine.Add(3, ShareOf(first, kMeanOfAll, 9, 1), kStart).ok());
  ASSERT_TRUE(engine.Add(1, ShareOf(second, kMeanOfAll, 2, 2), kStart).ok());
  EXPECT_THAT(engine.OldestWaitingFor(2)->id, second);
  EXPECT_FALSE(engine.OldestWaitingFor(1));
  const auto one = engine.Add(0, ShareOf(first, kMeanOfAll, 3, 1), kStart);
  ASSERT_TRUE(one.ok() && one->completed) << one.status();
  EXPECT_THAT(one->completed->results, ElementsAre(0, 3));
  EXPECT_EQ(ResultOf(*one->completed), 7);  // (2 × 3 + 4 × 9) / 6
  EXPECT_EQ(FoldRound(*one->completed, 1, nullptr)->workers, 6u);
  const auto two = engine.Add(2, ShareOf(second, kMeanOfAll, 4, 2), kStart);
  ASSERT_TRUE(two.ok() && two->completed) << two.status();
  EXPECT_EQ(ResultOf(*two->completed), 3);
}

TEST(RoundCollectiveTest, NodeOutsideTheGroupIsRefused) {
  RoundEngine engine = Engine(3);
  ASSERT_TRUE(engine.SetGroup({1, {{0, 1}, {2, 3}}, 2}).ok());
  const auto outside = engine.Add(1, ShareOf(kId, kMeanOfAll, 1, 1), kStart);
  EXPECT_TRUE(absl::IsInvalidArgument(outside.status()));
  EXPECT_THAT(MessageOf(outside), HasSubstr("node 1 is not in group 1"));
  const auto unknown = engine.Add(1, ShareOf(kId, kMeanOfAll, 1, 7), kStart);
  EXPECT_THAT(MessageOf(unknown), HasSubstr("group 7 has not been declared"));
}

TEST(RoundCollectiveTest, GroupIsDeclaredOnceAndTheSameByAll) {
  RoundEngine engine = Engine(3);
  const Group group{1, {{0, 1}, {2, 3}}, 4};
  ASSERT_TRUE(engine.SetGroup(group).ok());
  const uint64_t reserved = engine.max_held();
  EXPECT_EQ(reserved, 3u * 8 + 2u * 4);
  EXPECT_TRUE(engine.SetGroup(group).ok());
  EXPECT_EQ(engine.max_held(), reserved);
  const absl::Status other = engine.SetGroup({1, {{0, 1}, {1, 2}}, 4});
  EXPECT_TRUE(absl::IsInvalidArgument(other));
  EXPECT_THAT(std::string(other.message()), HasSubstr("node 2 with 3 workers"));
  EXPECT_TRUE(absl::IsInvalidArgument(engine.SetGroup({1, group.members, 5})));
  EXPECT_TRUE(absl::IsInvalidArgument(engine.SetGroup({0, {{0, 1}}, 4})));
  EXPECT_TRUE(absl::IsInvalidArgument(engine.SetGroup({2, {}, 4})));
  EXPECT_TRUE(absl::IsInvalidArgument(engine.SetGroup({2, {{1, 1}, {0, 1}}, 4})));
  EXPECT_TRUE(absl::IsInvalidArgument(engine.SetGroup({2, {{3, 1}}, 4})));
  EXPECT_TRUE(absl::IsInvalidArgument(engine.SetGroup({2, {{0, 0}}, 4})));
}

TEST(RoundCollectiveTest, NumberOfGroupsIsBounded) {
  RoundEngine engine = Engine(1);
  uint32_t id = 1;
  for (; id < RoundEngine::kMaxGroups; ++id) ASSERT_TRUE(engine.SetGroup({id, {{0, 1}}, 2}).ok());
  EXPECT_TRUE(absl::IsResourceExhausted(engine.SetGroup({id, {{0, 1}}, 2})));
}

TEST(RoundCollectiveTest, GroupsUsedInOppositeOrdersNeverWaitForEachOther) {
  RoundEngine engine = Engine(2, 2);
  const std::vector<GroupMember> both = {{0, 1}, {1, 2}};
  ASSERT_TRUE(engine.SetGroup({1, both, 1}).ok());  // gets kLeastWindow
  ASSERT_TRUE(engine.SetGroup({2, both, 1}).ok());
  const auto share = [](uint32_t group, uint32_t chunk) {
    return ShareOf({{group, 0}, chunk, 1}, kMeanOfAll, 1, group);
  };
  // Each node fills the windows of all groups, in its own order, before it gets any result.
  size_t completed = 0;
  for (const auto& [node, order] : {std::pair{0, std::vector<uint32_t>{0, 1, 2}},
                                    std::pair{1, std::vector<uint32_t>{2, 0, 1}}}) {
    for (const uint32_t group : order) {
      for (uint32_t chunk = 0; chunk < kLeastWindow; ++chunk) {
        const auto added = engine.Add(node, share(group, chunk), kStart);
        ASSERT_TRUE(added.ok()) << added.status();
        completed += added->completed ? 1 : 0;
      }
      if (node == 0) {
        EXPECT_TRUE(absl::IsResourceExhausted(
            engine.Add(node, share(group, kLeastWindow), kStart).status()));
      }
    }
  }
  EXPECT_EQ(completed, 6u);
}

TEST(RoundCollectiveTest, ResultsThatANodeDoesNotTakeCountTowardsAllItsWindows) {
  RoundEngine engine = Engine(2, 2);
  ASSERT_TRUE(engine.SetGroup({1, {{0, 1}, {1, 2}}, 2}).ok());
  const auto share = [](uint32_t group, uint32_t chunk) {
    return ShareOf({{group, 0}, chunk, 1}, kMeanOfAll, 1, group);
  };
  // Two results of group 0 that it has not taken leave it the window of group 1.
  ASSERT_TRUE(engine.Add(0, share(1, 0), kStart, 2).ok());
  ASSERT_TRUE(engine.Add(0, share(1, 1), kStart, 2).ok());
  EXPECT_TRUE(absl::IsResourceExhausted(engine.Add(0, share(0, 0), kStart, 2).status()));
  EXPECT_TRUE(engine.Add(0, share(0, 0), kStart, 1).ok());
}

}  // namespace
}  // namespace thalweg::round_collective_test
