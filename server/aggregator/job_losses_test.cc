// These tests lose nodes of a job that says with how many it goes on.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "server/aggregator/job_test_util.h"

namespace thalweg::job_losses_test {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr BucketId kBucket{0, 0};
constexpr Duration kGrace = std::chrono::seconds(3);
constexpr Duration kRoundTimeout = std::chrono::hours(1);
constexpr uint32_t kMinNodes = 2;
const absl::Status kWhy = absl::UnavailableError("rank 7 is gone");

// Three nodes of 1, 2 and 1 workers contribute their number plus one.
class JobLossesTest : public ::testing::Test {
 protected:
  using Rounds = std::vector<BucketRounds>;

  // With `rounds`, by node, the nodes resume the job.
  explicit JobLossesTest(const std::vector<Rounds>& rounds = {}) {
    for (uint32_t node = 0; node < 3; ++node) {
      JoinRequest request = RequestOf(node, 3);
      request.workers = node == 1 ? 2 : 1;
      request.world_size = 4;
      request.round_timeout = kRoundTimeout;
      request.losses = {kMinNodes, kGrace};
      if (!rounds.empty()) {
        request.chunk_bytes = kMinChunkBytes;
        request.window_chunks = 64;
        request.resume = rounds[node];
      }
      if (node == 0) job_ = std::make_unique<Job>(request, 64, memory_, metrics_, faults_);
      sinks_.push_back(std::make_shared<ListSink>());
      EXPECT_TRUE(job_->AddMember(request, sinks_.back(), start_).ok());
    }
    EXPECT_TRUE(TermsOf(*job_).ok());
    const BucketLayout layout{DType::kFloat32, {{"w", {1}}}};
    for (uint32_t node = 0; node < 3; ++node) {
      EXPECT_TRUE(job_->RegisterBucket(node, {kBucket, layout}).ok());
    }
  }
  absl::Status Contribute(uint32_t node, uint64_t round) {
    Contribution contribution;
    contribution.id = {kBucket, 0, round};
    contribution.epoch = 1;
    contribution.elems = 1;
    const auto bytes =
        std::make_shared<const Bytes>(EncodedFloats({1.0F + static_cast<float>(node)}));
    contribution.payload = Payload(std::span(*bytes), bytes);
    return job_->Contribute(node, std::move(contribution), start_);
  }
  // Expects that the last result of each of these nodes is this mean.
  void ExpectMean(std::vector<uint32_t> nodes, uint64_t round, float mean, uint32_t workers) {
    for (const uint32_t node : nodes) {
      ASSERT_FALSE(sinks_[node]->results.empty());
      const RoundResult& result = sinks_[node]->results.back();
      EXPECT_EQ(result.id.round, round);
      EXPECT_EQ(result.workers, workers);
      EXPECT_EQ(DecodedFloats(result.payload), Floats{mean});
      EXPECT_THAT(sinks_[node]->failures, IsEmpty());
    }
  }
  double Lost() { return registry_.GetCounter("thalweg_shard_lost_nodes_total", "").Value(); }

  const TimePoint start_ = Now();
  MetricRegistry registry_;
  ShardMetrics metrics_{registry_};
  MemoryBudget memory_{1 << 30, metrics_.memory_reserved_bytes};
  FaultLog faults_;
  std::unique_ptr<Job> job_;
  std::vector<std::shared_ptr<ListSink>> sinks_;
};

TEST_F(JobLossesTest, OpenRoundsAndLaterOnesGiveTheMeanOfTheNodesThatAreLeft) {
  ASSERT_TRUE(Contribute(0, 1).ok() && Contribute(2, 1).ok());
  job_->RemoveMember(1, kWhy);
  ExpectMean({0, 2}, 1, 2, 2);
  ASSERT_TRUE(Contribute(2, 2).ok() && Contribute(0, 2).ok());
  ExpectMean({0, 2}, 2, 2, 2);
  EXPECT_EQ(Lost(), 1);
  EXPECT_FALSE(job_->IsEmpty());
}

TEST_F(JobLossesTest, NodesThatLearnOfTheirJobAfterALossContributeToItsRounds) {
  const uint64_t epoch = TermsOf(*job_)->epoch;
  job_->RemoveMember(1, kWhy);
  EXPECT_EQ(TermsOf(*job_)->epoch, epoch);
}

TEST_F(JobLossesTest, RoundIsNotLateForTheTimeInWhichItsProcessWasStopped) {
  ASSERT_TRUE(Contribute(0, 1).ok() && Contribute(2, 1).ok());
  const TimePoint resumed = start_ + 2 * kRoundTimeout;
  job_->Tick(resumed, resumed);
  EXPECT_THAT(sinks_[0]->failures, IsEmpty());
  const TimePoint late = resumed + kRoundTimeout + std::chrono::seconds(1);
  for (const uint32_t node : {0, 1, 2}) ASSERT_TRUE(job_->Heartbeat(node, late).ok());
  job_->Tick(late, resumed);
  ASSERT_THAT(sinks_[0]->failures, SizeIs(1));
  EXPECT_THAT(std::string(sinks_[0]->failures[0].message()), HasSubstr("for node 1 (host1)"));
}

TEST_F(JobLossesTest, WhatALostNodeHasContributedCounts) {
  ASSERT_TRUE(Contribute(1, 1).ok());
  job_->RemoveMember(1, kWhy);
  ASSERT_TRUE(Contribute(0, 1).ok() && Contribute(2, 1).ok());
  ExpectMean({0, 2}, 1, 2, 4);
}

TEST_F(JobLossesTest, SilentNodeIsLostAndToldSo) {
  const TimePoint late = start_ + kGrace + kHeartbeatInterval + std::chrono::milliseconds(1);
  for (const uint32_t node : {0, 2}) ASSERT_TRUE(job_->Heartbeat(node, late).ok());
  job_->Tick(late - std::chrono::milliseconds(2));
  EXPECT_EQ(Lost(), 0);
  job_->Tick(late);
  EXPECT_EQ(Lost(), 1);
  ASSERT_THAT(sinks_[1]->failures, SizeIs(1));
  EXPECT_THAT(std::string(sinks_[1]->failures[0].message()),
              HasSubstr("the job goes on without this node: node 1 (host1) has sent nothing"));
  EXPECT_TRUE(absl::IsFailedPrecondition(Contribute(1, 1)));
  ASSERT_TRUE(Contribute(0, 1).ok() && Contribute(2, 1).ok());
  ExpectMean({0, 2}, 1, 2, 2);
}

TEST_F(JobLossesTest, NodesThatAProcessCouldNotHearAreNotLost) {
  const TimePoint resumed = start_ + std::chrono::minutes(1);
  job_->Tick(resumed, resumed);
  const TimePoint late = resumed + kGrace + kHeartbeatInterval + std::chrono::milliseconds(1);
  for (const uint32_t node : {0, 2}) ASSERT_TRUE(job_->Heartbeat(node, late).ok());
  EXPECT_EQ(Lost(), 0);
  job_->Tick(late, resumed);  // node 1 has not spoken since
  EXPECT_EQ(Lost(), 1);
}

TEST_F(JobLossesTest, JobEndsWellWhenItsLastNodeIsLostAfterTheOthersHaveLeft) {
  for (const uint32_t node : {0, 2}) job_->RemoveMember(node, absl::OkStatus());
  job_->Tick(start_ + kGrace + std::chrono::minutes(1));
  EXPECT_TRUE(job_->IsEmpty());
  EXPECT_EQ(Lost(), 1);
  EXPECT_EQ(registry_.GetCounter("thalweg_shard_jobs_ended_total", "", {{"outcome", "ok"}}).Value(),
            1);
}

TEST_F(JobLossesTest, JobWithTooFewNodesFails) {
  job_->RemoveMember(1, kWhy);
  job_->RemoveMember(2, kWhy);
  ASSERT_THAT(sinks_[0]->failures, SizeIs(1));
  EXPECT_THAT(std::string(sinks_[0]->failures[0].message()), HasSubstr("rank 7 is gone"));
  EXPECT_EQ(Lost(), 1);
  EXPECT_FALSE(Contribute(0, 1).ok());
}

TEST_F(JobLossesTest, NodeThatLeavesInPeaceIsNotLost) {
  ASSERT_TRUE(Contribute(0, 1).ok());
  job_->RemoveMember(1, absl::OkStatus());
  ASSERT_THAT(sinks_[0]->failures, SizeIs(1));
  EXPECT_THAT(std::string(sinks_[0]->failures[0].message()), HasSubstr("left while round 1"));
}

TEST_F(JobLossesTest, RestartedNodeCannotReturnToAJobThatHasGoneOn) {
  JoinRequest request = RequestOf(2, 3);
  request.identity = "key";
  request.losses = {kMinNodes, kGrace};
  Job job(request, 64, memory_, metrics_, faults_);
  for (uint32_t node = 0; node < 3; ++node) {
    request.node = node;
    ASSERT_TRUE(job.AddMember(request, std::make_shared<ListSink>(), start_).ok());
  }
  const auto terms = TermsOf(job);
  ASSERT_TRUE(terms.ok());
  job.RemoveMember(1, kWhy);
  request.chunk_bytes = terms->chunk_bytes;
  request.window_chunks = terms->window_chunks;
  request.resume.emplace();
  const auto again = job.GathersAgainFor(request);
  EXPECT_TRUE(absl::IsFailedPrecondition(again.status())) << again.status();
}

// Only node 0 has the result of round 1.
class ResumedJobLossesTest : public JobLossesTest {
 protected:
  ResumedJobLossesTest() : JobLossesTest({{{kBucket, {1}}}, {}, {}}) {}

  absl::Status Supply() {
    const auto bytes = std::make_shared<const Bytes>(EncodedFloats({7}));
    return job_->Supply(
        0, {{kBucket, 0, 1}, 1, WireFormat::kFloat32, 1, 4, 0, Payload(std::span(*bytes), bytes)},
        start_);
  }
};

TEST_F(ResumedJobLossesTest, NodeThatWasToSupplyWhatOthersLackEndsTheJobWithItsReason) {
  ASSERT_TRUE(Contribute(1, 1).ok());
  job_->RemoveMember(0, kWhy);
  for (const uint32_t node : {1, 2}) {
    ASSERT_THAT(sinks_[node]->failures, SizeIs(1));
    EXPECT_THAT(
        std::string(sinks_[node]->failures[0].message()),
        HasSubstr("the result of round 1 of chunk 0 of bucket 0, which others lack, was to come "
                  "from it: node 0 (host0): rank 7 is gone"));
  }
}

TEST_F(ResumedJobLossesTest, LossOfAnotherNodeLetsAResultBeSuppliedAndTheJobGoOn) {
  ASSERT_TRUE(Contribute(1, 1).ok());
  job_->RemoveMember(2, kWhy);
  ASSERT_TRUE(Supply().ok());
  ExpectMean({1}, 1, 7, 4);
  ASSERT_TRUE(Contribute(0, 2).ok() && Contribute(1, 2).ok());
  ExpectMean({0, 1}, 2, 5.0F / 3, 3);
}

TEST_F(JobLossesTest, WeightsOnTheShardNeedAllNodes) {
  BucketAnnouncement served{{1, 0}, {DType::kFloat32, {{"w", {1}}}}};
  served.update = UpdateRule{.groups = {0}};
  EXPECT_THAT(std::string(job_->RegisterBucket(0, served).message()), HasSubstr("need all nodes"));
}

TEST_F(JobLossesTest, CollectivesOfGroupsNeedAllNodes) {
  const absl::Status refused = job_->MakeGroup(0, {1, {{0, 1}, {1, 1}}, 8});
  EXPECT_THAT(std::string(refused.message()), HasSubstr("need all nodes"));
}

}  // namespace
}  // namespace thalweg::job_losses_test
