// These tests update one weight of nodes that train by themselves, by a quorum of them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "server/aggregator/job_test_util.h"

namespace thalweg::job_quorum_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr BucketId kBucket{0, 0};
constexpr uint64_t kEnd = 2;      // settings of a round of all,
constexpr uint64_t kNothing = 3;  // and of one to which the node gives nothing
constexpr Duration kGrace = std::chrono::milliseconds(100);

// Three nodes of 1, 2 and 1 workers. The weight begins with 0, and a push is subtracted from it.
class JobQuorumTest : public ::testing::Test {
 protected:
  void Begin(bool drops_late = false, uint32_t min_nodes = 0) {
    for (uint32_t node = 0; node < 3; ++node) {
      JoinRequest request = RequestOf(node, 3);
      request.workers = node == 1 ? 2 : 1;
      request.world_size = 4;
      request.round_timeout = std::chrono::seconds(30);
      request.losses = {min_nodes, std::chrono::seconds(3)};
      if (node == 0) job_ = std::make_unique<Job>(request, 64, memory_, metrics_, faults_);
      sinks_.push_back(std::make_shared<ListSink>());
      EXPECT_TRUE(job_->AddMember(request, sinks_.back(), now_).ok());
    }
    ASSERT_TRUE(TermsOf(*job_).ok());
    BucketAnnouncement bucket{kBucket, {DType::kFloat32, {{"w", {1}}}}};
    bucket.update = UpdateRule{.groups = {0},
                               .quorum = 2,
                               .grace_ms = kGrace / std::chrono::milliseconds(1),
                               .drops_late = drops_late};
    for (uint32_t node = 0; node < 3; ++node) {
      ASSERT_TRUE(job_->RegisterBucket(node, bucket).ok());
      UpdateStep step{{{.lr = 1}}};
      ASSERT_TRUE(job_->SetSettings(node, NumberOf(node, 1), step).ok());
      step.waits_for_all = true;
      ASSERT_TRUE(job_->SetSettings(node, NumberOf(node, kEnd), step).ok());
      step.gives_nothing = true;
      ASSERT_TRUE(job_->SetSettings(node, NumberOf(node, kNothing), step).ok());
    }
    ASSERT_TRUE(job_->WriteWeights(0, kBucket, 0, 0, {{0.0F}, 0}).ok());
    rounds_.assign(3, 0);
  }
  static uint64_t NumberOf(uint64_t node, uint64_t number) {
    return ((node + 1) << StepSettings::kSeriesBit) + number;
  }
  absl::Status Push(uint32_t node, float value, uint64_t settings = 1) {
    Contribution contribution{{kBucket, 0, ++rounds_[node]},
                              1,
                              WireFormat::kFloat32,
                              1,
                              Split(EncodedFloats({value}), {})};
    contribution.settings = NumberOf(node, settings);
    return job_->Contribute(node, std::move(contribution), now_);
  }
  void TickAfter(Duration time) {
    now_ += time;
    for (uint32_t node = 0; node < 3; ++node) job_->Heartbeat(node, now_).status().IgnoreError();
    job_->Tick(now_);
  }
  // Expects that the node has got this weight for its latest push, and nothing for a later one.
  void ExpectWeight(uint32_t node, float weight) {
    ASSERT_THAT(sinks_[node]->results, SizeIs(rounds_[node])) << "node " << node;
    const RoundResult& result = sinks_[node]->results.back();
    EXPECT_EQ(result.id, (RoundId{kBucket, 0, rounds_[node]}));
    EXPECT_EQ(DecodedFloats(result.payload), Floats{weight}) << "node " << node;
  }
  double Count(const char* name, const Labels& labels) {
    return registry_.GetCounter(name, "", labels).Value();
  }

  TimePoint now_ = Now();
  MetricRegistry registry_;
  ShardMetrics metrics_{registry_};
  FaultLog faults_;
  MemoryBudget memory_{TestJob::kPlenty, metrics_.memory_reserved_bytes};
  std::unique_ptr<Job> job_;
  std::vector<std::shared_ptr<ListSink>> sinks_;
  std::vector<uint64_t> rounds_;  // by node: those that it has contributed to
};

TEST_F(JobQuorumTest, WeightsAreUpdatedWithTheMeanOfAQuorumsWorkersWhenTheGraceIsOver) {
  Begin();
  ASSERT_TRUE(Push(0, -1).ok());
  ASSERT_TRUE(Push(1, -4).ok());
  TickAfter(kGrace / 2);
  EXPECT_THAT(sinks_[0]->results, IsEmpty());
  TickAfter(kGrace / 2);
  ExpectWeight(0, 3);  // (1 + 2 * 4) / 3
  ExpectWeight(1, 3);
  EXPECT_THAT(sinks_[2]->results, IsEmpty());
}

TEST_F(JobQuorumTest, LateNodeGetsTheWeightsOfTheMomentAndIsInTheNextMean) {
  Begin();
  ASSERT_TRUE(Push(0, -1).ok());
  ASSERT_TRUE(Push(1, -4).ok());
  TickAfter(kGrace);
  ASSERT_TRUE(Push(2, -6).ok());
  ExpectWeight(2, 3);
  ASSERT_TRUE(Push(2, -1).ok());  // its next one
  ASSERT_TRUE(Push(0, -1).ok());
  ASSERT_TRUE(Push(1, -1).ok());
  for (uint32_t node = 0; node < 3; ++node) ExpectWeight(node, 5);  // (6 + 1 + 1 + 2 * 1) / 5 more
  EXPECT_EQ(Count("thalweg_shard_late_total", {{"node", "2"}}), 1);
  EXPECT_EQ(Count("thalweg_shard_stale_updates_total", {{"node", "2"}}), 1);
  EXPECT_EQ(Count("thalweg_shard_stale_updates_total", {{"node", "0"}}), 0);
}

TEST_F(JobQuorumTest, WhatWaitsForAQuorumIsReportedAndCounted) {
  Begin();
  ASSERT_TRUE(Push(2, 1).ok());
  JobReport report = job_->Report(now_ + kGrace);
  EXPECT_EQ(report.held_bytes, sizeof(float));
  EXPECT_EQ(metrics_.held_bytes.Value(), sizeof(float));
  ASSERT_TRUE(report.waiting);
  EXPECT_THAT(report.waiting->missing, ElementsAre(0, 1));
  EXPECT_EQ(report.waiting->open, kGrace);

  ASSERT_TRUE(Push(1, 1).ok());
  TickAfter(kGrace);
  ASSERT_TRUE(Push(0, 1).ok());  // late: it waits for the next update
  report = job_->Report(now_);
  EXPECT_EQ(report.held_bytes, sizeof(float));
  EXPECT_FALSE(report.waiting) << "its node has been answered";

  for (const uint32_t node : {0, 1, 2}) ASSERT_TRUE(Push(node, 1).ok());
  EXPECT_EQ(job_->Report(now_).held_bytes, 0u);
  EXPECT_EQ(metrics_.held_bytes.Value(), 0);
}

TEST_F(JobQuorumTest, WhatIsLateChangesNoWeightWhereItIsDropped) {
  Begin(/*drops_late=*/true);
  ASSERT_TRUE(Push(0, -1).ok());
  ASSERT_TRUE(Push(1, -4).ok());
  TickAfter(kGrace);
  ASSERT_TRUE(Push(2, -6).ok());
  ExpectWeight(2, 3);
  for (uint32_t node = 0; node < 3; ++node) ASSERT_TRUE(Push(node, -1).ok());
  for (uint32_t node = 0; node < 3; ++node) ExpectWeight(node, 4);
  EXPECT_EQ(Count("thalweg_shard_late_total", {{"node", "2"}}), 1);
}

TEST_F(JobQuorumTest, RoundOfAllGivesAllTheSameWeights) {
  Begin();
  ASSERT_TRUE(Push(0, -1).ok());
  ASSERT_TRUE(Push(1, -4).ok());
  TickAfter(kGrace);
  ASSERT_TRUE(Push(0, 0, kNothing).ok());
  ASSERT_TRUE(Push(1, -1, kEnd).ok());
  TickAfter(kGrace);
  EXPECT_THAT(sinks_[1]->results, SizeIs(1)) << "waits for node 2";
  ASSERT_TRUE(Push(2, -4).ok());  // late
  ExpectWeight(2, 3);
  ASSERT_TRUE(Push(2, -2, kEnd).ok());
  for (uint32_t node = 0; node < 3; ++node) ExpectWeight(node, 5);  // (2 * 1 + 4 + 2) / 4 more
  for (uint32_t node = 0; node < 3; ++node) ASSERT_TRUE(Push(node, 9, kNothing).ok());
  for (uint32_t node = 0; node < 3; ++node) ExpectWeight(node, 5);
}

TEST_F(JobQuorumTest, JobGoesOnWithAQuorumWhenANodeIsLost) {
  Begin(/*drops_late=*/false, /*min_nodes=*/2);
  ASSERT_TRUE(Push(1, -4).ok());
  ASSERT_TRUE(Push(0, -1).ok());
  job_->RemoveMember(2, absl::UnavailableError("rank 3 is gone"));
  ExpectWeight(0, 3);
  ExpectWeight(1, 3);
  ASSERT_TRUE(Push(0, -1).ok());
  ASSERT_TRUE(Push(1, -1).ok());
  ExpectWeight(0, 4);
  job_->RemoveMember(1, absl::UnavailableError("rank 1 is gone"));
  ASSERT_THAT(sinks_[0]->failures, SizeIs(1));
  EXPECT_THAT(std::string(sinks_[0]->failures[0].message()), HasSubstr("rank 1 is gone"));
}

TEST_F(JobQuorumTest, NodeMayLeaveWithoutAWordAsLongAsThereIsAQuorum) {
  Begin();
  ASSERT_TRUE(Push(0, -1).ok());
  ASSERT_TRUE(Push(1, -4).ok());
  job_->RemoveMember(2, absl::OkStatus());
  ExpectWeight(0, 3);
  ASSERT_TRUE(Push(0, -1).ok());
  job_->RemoveMember(1, absl::OkStatus());
  ASSERT_THAT(sinks_[0]->failures, SizeIs(1));
  EXPECT_THAT(std::string(sinks_[0]->failures[0].message()),
              HasSubstr("bucket 0 round 2 chunk 0 cannot complete: node 1 (host1) left"));
}

TEST_F(JobQuorumTest, NodeThatWaitsForAQuorumForTooLongFailsTheJobWithTheNamesOfTheOthers) {
  Begin();
  ASSERT_TRUE(Push(1, -1).ok());
  TickAfter(std::chrono::seconds(30));
  EXPECT_THAT(sinks_[1]->failures, IsEmpty());
  TickAfter(std::chrono::seconds(1));
  ASSERT_THAT(sinks_[1]->failures, SizeIs(1));
  EXPECT_THAT(std::string(sinks_[1]->failures[0].message()),
              HasSubstr("waited 30 s for node 0 (host0), node 2 (host2)"));
}

TEST_F(JobQuorumTest, RoundOfAllIsRefusedWhereNobodyWaitsForAQuorum) {
  Begin();
  BucketAnnouncement bucket{{1, 0}, {DType::kFloat32, {{"v", {1}}}}};
  bucket.update = UpdateRule{.groups = {0}};
  ASSERT_TRUE(job_->RegisterBucket(0, bucket).ok());
  ASSERT_TRUE(job_->WriteWeights(0, {1, 0}, 0, 0, {{0.0F}, 0}).ok());
  for (uint32_t node = 0; node < 3; ++node) {
    Contribution contribution{
        {{1, 0}, 0, 1}, 1, WireFormat::kFloat32, 1, Split(EncodedFloats({1}), {})};
    contribution.settings = NumberOf(0, kEnd);
    const absl::Status status = job_->Contribute(node, std::move(contribution), now_);
    if (node < 2) {
      EXPECT_TRUE(status.ok()) << status;
    } else {
      EXPECT_THAT(std::string(status.message()), HasSubstr("only a round that waits for all"));
    }
  }
}

}  // namespace
}  // namespace thalweg::job_quorum_test
