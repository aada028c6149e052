#include "server/round/job_rounds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/protocol.h"
#include "server/round/round_test_util.h"

namespace thalweg::job_rounds_test {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using Verdict = RoundEngine::Verdict;

constexpr TimePoint kNow{};
constexpr BucketId kBucket{0, 0, 0};
constexpr uint32_t kNodes = 2;

// Two nodes with a bucket of one element.
class JobRoundsTest : public ::testing::Test {
 protected:
  void Begin(const std::optional<UpdateRule>& rule = {}, bool resumes = false) {
    rounds_.reset();
    has_rule_ = rule.has_value();
    members_ = std::make_unique<Members>(Request(0));
    first_ = Request(0);
    if (resumes) first_.resume.emplace();
    rounds_ = std::make_unique<JobRounds>(first_, *members_, /*keeps_snapshots=*/false);
    for (uint32_t node = 0; node < kNodes; ++node) members_->Join(Request(node), kNow);
    members_->Begin(kNow);
    ASSERT_TRUE(rounds_->Begin({.chunk_bytes = kMinChunkBytes, .window_chunks = 4}).ok());
    for (uint32_t node = 0; node < kNodes; ++node) {
      BucketAnnouncement bucket{kBucket, {DType::kFloat32, {{"w", {1}}}}};
      bucket.update = rule;
      const absl::Status registered = rounds_->Register(node, bucket);
      ASSERT_TRUE(registered.ok()) << registered;
      ASSERT_TRUE(rounds_->SetSettings(node, 1, UpdateStep{{{.lr = 0.1}}}).ok());
    }
  }
  static UpdateRule Rule() {
    UpdateRule rule;
    rule.groups = {0};
    return rule;
  }
  static JoinRequest Request(uint32_t node) {
    JoinRequest request;
    request.job = "job";
    request.node = node;
    request.node_name = absl::StrCat("host", node);
    request.num_nodes = kNodes;
    request.num_shards = 1;
    request.world_size = kNodes;
    request.workers = 1;
    request.chunk_bytes = kMinChunkBytes;
    request.round_timeout = std::chrono::seconds(10);
    return request;
  }
  absl::StatusOr<JobRounds::Held> TryToHold(uint32_t node) {
    Contribution share = Share({kBucket, 0, 1}, 1);
    share.settings = has_rule_ ? 1 : 0;
    return rounds_->Hold(node, std::move(share), kNow, /*backlog=*/0);
  }
  JobRounds::Held Hold(uint32_t node) {
    auto held = TryToHold(node);
    EXPECT_TRUE(held.ok()) << held.status();
    return held.ok() ? *std::move(held) : JobRounds::Held();
  }

  bool has_rule_ = false;
  JoinRequest first_;
  std::unique_ptr<Members> members_;
  std::unique_ptr<JobRounds> rounds_;
};

TEST_F(JobRoundsTest, RuleOfABucketSaysWhomAContributionWaitsFor) {
  Begin();
  EXPECT_EQ(Hold(0).counted.value().verdict, Verdict::kHeld);
  EXPECT_EQ(rounds_->Oldest().value().missing, std::vector<uint32_t>{1});
  const auto last = Hold(1);
  ASSERT_TRUE(last.completed);
  EXPECT_THAT(last.completed->round.payloads, SizeIs(2));
  EXPECT_EQ(last.completed->state, nullptr);

  UpdateRule alone = Rule();
  alone.alone = true;
  Begin(alone);
  rounds_->StateOf(kBucket, 0, 1);
  const auto own = Hold(1);
  ASSERT_TRUE(own.completed);
  EXPECT_TRUE(own.completed->round.is_lone);
  EXPECT_EQ(own.completed->state, rounds_->states().Find(kBucket, 0));

  UpdateRule quorum = Rule();
  quorum.quorum = 2;
  Begin(quorum);
  rounds_->StateOf(kBucket, 0, 1);
  EXPECT_TRUE(Hold(1).counted.value().late);
  EXPECT_EQ(rounds_->open_rounds(), 0u);  // nodes number what they give by themselves
  EXPECT_EQ(rounds_->Oldest().value().missing, std::vector<uint32_t>{0});
  EXPECT_TRUE(Hold(0).completed);
}

TEST_F(JobRoundsTest, RoundWithoutTheWeightsThatItUpdatesIsRefused) {
  Begin(Rule());
  Hold(0);
  EXPECT_TRUE(absl::IsFailedPrecondition(TryToHold(1).status()));
  Begin(Rule(), /*resumes=*/true);
  Hold(0);
  EXPECT_TRUE(absl::IsDataLoss(TryToHold(1).status()));
}

TEST_F(JobRoundsTest, StateOfALayoutIsDroppedWithTheFirstRoundOfTheNext) {
  Begin();
  const auto state = rounds_->StateOf(kBucket, 0, 1);
  EXPECT_EQ(rounds_->StateOf(kBucket, 0, 1), state);
  constexpr BucketId kNext{0, 1, 0};
  for (uint32_t node = 0; node < kNodes; ++node) {
    ASSERT_TRUE(rounds_->Register(node, {kNext, {DType::kFloat32, {{"w", {1}}}}}).ok());
  }
  EXPECT_EQ(rounds_->states().Find(kBucket, 0), state);
  for (uint32_t node = 0; node < kNodes; ++node) {
    ASSERT_TRUE(rounds_->Hold(node, Share({kNext, 0, 1}, 1), kNow, 0).ok());
  }
  EXPECT_EQ(rounds_->states().Find(kBucket, 0), nullptr);
}

TEST_F(JobRoundsTest, NodeThatARoundWaitsForCannotLeave) {
  Begin();
  Hold(0);
  EXPECT_THAT(*rounds_->Leave(0, kNow), IsEmpty());
  const absl::Status left = rounds_->Leave(1, kNow).status();
  EXPECT_TRUE(absl::IsAborted(left));
  EXPECT_THAT(std::string(left.message()), HasSubstr("node 1 (host1) left while round 1"));
}

TEST_F(JobRoundsTest, RoundsThatWaitForALostNodeAloneAreComplete) {
  Begin();
  Hold(0);
  const auto completed = rounds_->Lose(1, absl::UnavailableError("gone"), kNow);
  ASSERT_THAT(*completed, SizeIs(1));
  EXPECT_EQ(completed->front().last_node, 1u);
  EXPECT_EQ(ResultOf(completed->front().round), 1);
}

TEST_F(JobRoundsTest, NothingIsHeldOnceItIsReleased) {
  Begin();
  Hold(0);
  rounds_->StateOf(kBucket, 0, 1);
  EXPECT_GT(rounds_->held_bytes(), 0u);
  rounds_->Release();
  EXPECT_EQ(rounds_->held_bytes() + rounds_->open_rounds() + rounds_->state_bytes(), 0u);
  EXPECT_FALSE(rounds_->Oldest());
}

}  // namespace
}  // namespace thalweg::job_rounds_test
