// These tests check which metrics a shard counts for a job.
#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "server/aggregator/job_test_util.h"

namespace thalweg::job_metrics_test {
namespace {

constexpr BucketId kBucket{0, 0, 0};
constexpr TimePoint kStart{};

class JobMetricsTest : public ::testing::Test {
 protected:
  // Contributes two elements as chunk `chunk` of the first round.
  absl::Status Contribute(TestJob& job, uint32_t node, TimePoint now, float value = 1,
                          uint32_t chunk = 0) {
    Bytes bytes(2 * sizeof(float));
    std::memcpy(bytes.data() + sizeof(float), &value, sizeof(float));
    return job.job().Contribute(
        node, {{kBucket, chunk, 1}, 1, WireFormat::kFloat32, 2, Split(bytes, {})}, now);
  }
  static double Counted(TestJob& job, const std::string& name, const Labels& labels = {}) {
    return job.registry().GetCounter(name, "", labels).Value();
  }
  static double WaitedFor(TestJob& job, const char* node) {
    return Counted(job, "thalweg_shard_waited_for_seconds_total", {{"node", node}});
  }
  static Histogram& Wait(TestJob& job) {
    return job.registry().GetHistogram("thalweg_shard_phase_seconds", "",
                                       {{"phase", "wait_for_slowest"}});
  }
};

TEST_F(JobMetricsTest, WaitIsForTheNodeThatCameLast) {
  TestJob job({1, 1, 1});
  job.Register(kBucket, 2, WireFormat::kFloat32);
  ASSERT_TRUE(Contribute(job, 2, kStart).ok());
  ASSERT_TRUE(Contribute(job, 0, kStart + std::chrono::seconds(1)).ok());
  EXPECT_EQ(Wait(job).Sum(), 0);
  ASSERT_TRUE(Contribute(job, 1, kStart + std::chrono::seconds(3)).ok());
  EXPECT_EQ(Wait(job).Sum(), 3);
  EXPECT_EQ(WaitedFor(job, "0"), 0);
  EXPECT_EQ(WaitedFor(job, "1"), 2);  // seconds for node 1 alone
  EXPECT_EQ(WaitedFor(job, "2"), 0);
  EXPECT_EQ(Counted(job, "thalweg_shard_rounds_total", {{"outcome", "ok"}}), 1);
}

TEST_F(JobMetricsTest, LastContributionThatIsOlderThanTheFirstHasNotWaited) {
  TestJob job({1, 1});
  job.Register(kBucket, 2, WireFormat::kFloat32);
  ASSERT_TRUE(Contribute(job, 0, kStart + std::chrono::seconds(1)).ok());
  ASSERT_TRUE(Contribute(job, 1, kStart).ok());
  EXPECT_EQ(Wait(job).Sum(), 0);
  EXPECT_EQ(Wait(job).Count(0), 1u);
}

TEST_F(JobMetricsTest, NodesAboveABoundShareASeries) {
  MetricRegistry registry;
  const ShardMetrics metrics(registry);
  EXPECT_NE(&metrics.WaitedFor(62), &metrics.WaitedFor(63));
  EXPECT_NE(&metrics.WaitedFor(63), &metrics.WaitedFor(64));
  EXPECT_EQ(&metrics.WaitedFor(64), &metrics.WaitedFor(4095));
}

TEST_F(JobMetricsTest, FailureEndsTheJobOnceAndItsOpenRounds) {
  TestJob job({1, 1});
  job.Register(kBucket, 3 * kMinChunkBytes / sizeof(float), WireFormat::kFloat32);
  const Bytes chunk(kMinChunkBytes);
  for (const uint32_t number : {0u, 2u}) {
    ASSERT_TRUE(job.Contribute(0, {kBucket, number, 1}, WireFormat::kFloat32,
                               kMinChunkBytes / sizeof(float), chunk)
                    .ok());
  }
  job.job().Fail(absl::DeadlineExceededError("late"));
  job.job().Fail(absl::UnavailableError("gone"));
  const Labels late = {{"outcome", "deadline_exceeded"}};
  EXPECT_EQ(Counted(job, "thalweg_shard_rounds_total", late), 2);
  EXPECT_EQ(Counted(job, "thalweg_shard_jobs_ended_total", late), 1);
  job.job().RemoveMember(0, absl::OkStatus());
  job.job().RemoveMember(1, absl::OkStatus());
  for (const char* other : {"ok", "unavailable"}) {
    EXPECT_EQ(Counted(job, "thalweg_shard_jobs_ended_total", {{"outcome", other}}), 0);
    EXPECT_EQ(Counted(job, "thalweg_shard_rounds_total", {{"outcome", other}}), 0);
  }
}

TEST_F(JobMetricsTest, JobThatAllHaveLeftInOrderHasEndedWell) {
  TestJob job({1, 1});
  const Labels ok = {{"outcome", "ok"}};
  EXPECT_EQ(job.Metric("thalweg_shard_nodes"), 2);
  job.job().RemoveMember(0, absl::OkStatus());
  EXPECT_EQ(job.Metric("thalweg_shard_nodes"), 1);
  EXPECT_EQ(Counted(job, "thalweg_shard_jobs_ended_total", ok), 0);
  job.job().RemoveMember(1, absl::OkStatus());
  EXPECT_EQ(job.Metric("thalweg_shard_nodes"), 0);
  EXPECT_EQ(Counted(job, "thalweg_shard_jobs_ended_total", ok), 1);
}

TEST_F(JobMetricsTest, LimitIsWhatWindowsAllowUntilTheJobEnds) {
  TestJob job({1, 1});
  job.Register(kBucket, 2, WireFormat::kFloat32);
  const double limit = 2.0 * 64 * kMinChunkBytes;  // nodes, window and chunk of TestJob
  EXPECT_EQ(job.Metric("thalweg_shard_held_limit_bytes"), limit);
  job.Register({0, 0, 1}, 2, WireFormat::kFloat32);
  EXPECT_EQ(job.Metric("thalweg_shard_held_limit_bytes"), 2 * limit);
  job.job().Fail(absl::UnavailableError("gone"));
  EXPECT_EQ(job.Metric("thalweg_shard_held_limit_bytes"), 0);
}

TEST_F(JobMetricsTest, RoundsWithNonFiniteValuesAreCountedOnce) {
  TestJob job({1, 1});
  job.Register(kBucket, 2, WireFormat::kFloat32);
  for (const uint32_t node : {0u, 1u}) {
    ASSERT_TRUE(Contribute(job, node, kStart, std::numeric_limits<float>::quiet_NaN()).ok());
  }
  EXPECT_EQ(Counted(job, "thalweg_shard_nonfinite_rounds_total"), 1);
  EXPECT_EQ(job.NonFinite(), 1);
}

}  // namespace
}  // namespace thalweg::job_metrics_test
