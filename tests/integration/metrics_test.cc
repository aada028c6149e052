// These tests check which metrics sidecars count for a job.
#include <gtest/gtest.h>

#include <limits>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "tests/integration/training.h"

namespace thalweg::metrics_test {
namespace {

constexpr uint64_t kRounds = 3;
// The first bucket has several chunks, the second one; their code paths differ.
const std::vector<BucketLayout> kLayouts = {{DType::kFloat32, {{"a", {5000}}}},
                                            {DType::kFloat32, {{"b", {3}}}}};

Values Ones(uint32_t /*rank*/, uint32_t bucket, uint64_t /*round*/) {
  return Values(kLayouts[bucket].Elems(), 1.0f);
}

uint64_t Observed(const Histogram& histogram) {
  uint64_t count = 0;
  for (size_t i = 0; i <= Histogram::kBounds; ++i) count += histogram.Count(i);
  return count;
}

class SidecarMetricsTest : public ::testing::Test {
 protected:
  // All sidecars of a test's cluster count in one registry.
  static double Counted(Cluster& cluster, const std::string& name) {
    return cluster.registry().GetCounter("thalweg_sidecar_" + name, "").Value();
  }
  static Gauge& LossScale(Cluster& cluster) {
    return cluster.registry().GetGauge("thalweg_sidecar_loss_scale", "");
  }
  static Histogram& Phase(Cluster& cluster, const char* phase) {
    return cluster.registry().GetHistogram("thalweg_sidecar_phase_seconds", "", {{"phase", phase}});
  }
};

TEST_F(SidecarMetricsTest, EveryNodeCountsStepsBucketsAndTheirPhases) {
  constexpr uint64_t kBuckets = 2 * kRounds * 2;  // nodes, rounds, layouts
  Cluster cluster(2, 2, 2);
  const TimePoint start = Now();
  Training training(cluster, *CodecPolicy::Parse("fp32"));
  training.Run(0, kLayouts, kRounds, Ones);
  EXPECT_EQ(Counted(cluster, "steps_total"), 2.0 * kRounds);
  EXPECT_EQ(Counted(cluster, "buckets_total"), kBuckets);
  EXPECT_EQ(Counted(cluster, "nonfinite_buckets_total"), 0);
  for (const char* phase : {"wait", "reduce", "wire", "decode"}) {
    EXPECT_EQ(Observed(Phase(cluster, phase)), kBuckets) << phase;
    EXPECT_GT(Phase(cluster, phase).Sum(), 0) << phase;
  }
  const Histogram& whole = cluster.registry().GetHistogram("thalweg_sidecar_bucket_seconds", "");
  EXPECT_EQ(Observed(whole), kBuckets);
  // Both buckets of a node are in flight at once, but the time counts once.
  const double exchange = Counted(cluster, "exchange_seconds_total");
  EXPECT_GT(exchange, 0);
  EXPECT_LE(exchange, whole.Sum());
  EXPECT_LE(exchange, 2 * ToSeconds(Now() - start));
  EXPECT_GE(whole.Sum(), Phase(cluster, "wire").Sum());
}

TEST_F(SidecarMetricsTest, NodeAloneHasNoWire) {
  Cluster cluster(1, 2, 1);
  Training training(cluster, *CodecPolicy::Parse("fp32"));
  training.Run(0, kLayouts, kRounds, Ones);
  EXPECT_EQ(Counted(cluster, "steps_total"), kRounds);
  EXPECT_EQ(Observed(Phase(cluster, "reduce")), 2 * kRounds);
  EXPECT_EQ(Observed(Phase(cluster, "wire")), 0u);
  EXPECT_EQ(Observed(Phase(cluster, "decode")), 0u);
}

TEST_F(SidecarMetricsTest, BucketsWithNonFiniteValuesAreCountedOnce) {
  Cluster cluster(2, 1, 1);
  Training training(cluster, *CodecPolicy::Parse("fp32"));
  training.Run(0, kLayouts, kRounds, [](uint32_t rank, uint32_t bucket, uint64_t round) {
    Values values = Ones(rank, bucket, round);
    if (rank == 1 && bucket == 0 && round == 1) {
      for (const size_t i : {7, 4000}) values[i] = std::numeric_limits<float>::infinity();
    }
    return values;
  });
  EXPECT_EQ(Counted(cluster, "nonfinite_buckets_total"), 2);  // one on each node
  EXPECT_EQ(Counted(cluster, "nonfinite_elements_total"), 4);
}

TEST_F(SidecarMetricsTest, LossScaleAndSkippedStepsAreThoseOfTheNodesFirstWorker) {
  Cluster cluster(1, 2, 1);
  Training training(cluster, *CodecPolicy::Parse("fp32"));
  EXPECT_EQ(LossScale(cluster).Value(), 0);
  for (const uint64_t skipped : {0, 1, 0, 2}) {
    training.session(0).NotePrecision(512.0 / static_cast<double>(1 + skipped), skipped);
    training.session(1).NotePrecision(4096, skipped);
  }
  training.Run(0, kLayouts, 1, Ones);  // the sidecar has read all earlier messages
  EXPECT_EQ(LossScale(cluster).Value(), 512.0 / 3);
  EXPECT_EQ(Counted(cluster, "skipped_steps_total"), 3);
  for (const uint32_t rank : {0, 1}) {
    const SessionStats stats = training.session(rank).stats();
    EXPECT_EQ(stats.loss_scale, rank == 0 ? 512.0 / 3 : 4096);
    EXPECT_EQ(stats.skipped_steps, 3u);
  }
}

TEST_F(SidecarMetricsTest, LossScaleThatHasNotChangedIsNotSaidAgain) {
  Cluster cluster(1, 1, 1);
  Training training(cluster, *CodecPolicy::Parse("fp32"));
  training.session(0).NotePrecision(8, 1);
  training.Run(0, kLayouts, 1, Ones);
  EXPECT_EQ(LossScale(cluster).Value(), 8);
  LossScale(cluster).Set(-1);
  training.session(0).NotePrecision(8, 0);
  training.Run(0, kLayouts, 1, Ones);
  EXPECT_EQ(LossScale(cluster).Value(), -1);
  training.session(0).NotePrecision(8, 1);
  training.Run(0, kLayouts, 1, Ones);
  EXPECT_EQ(LossScale(cluster).Value(), 8);
  EXPECT_EQ(Counted(cluster, "skipped_steps_total"), 2);
}

TEST_F(SidecarMetricsTest, LossScaleIsTakenWhileARoundIsUnderWay) {
  Cluster cluster(1, 2, 1);
  Training training(cluster, *CodecPolicy::Parse("fp32"));
  training.Run(0, kLayouts, 1, Ones);
  const Values values = Ones(0, 0, 0);
  const auto gradient = std::as_bytes(std::span(values));
  auto first = SubmitAsync(training.session(0), {0, 0}, gradient);
  training.session(0).NotePrecision(2, 5);
  const TimePoint deadline = Now() + kTestPatience;
  while (LossScale(cluster).Value() != 2 && Now() < deadline) std::this_thread::yield();
  EXPECT_EQ(LossScale(cluster).Value(), 2);
  auto second = SubmitAsync(training.session(1), {0, 0}, gradient);
  EXPECT_TRUE(Get(first).ok());
  EXPECT_TRUE(Get(second).ok());
}

TEST_F(SidecarMetricsTest, ClosedSessionSaysNothingOfItsLossScale) {
  Cluster cluster(1, 1, 1);
  Training training(cluster, *CodecPolicy::Parse("fp32"));
  training.session(0).Close();
  training.session(0).NotePrecision(8, 1);
  EXPECT_EQ(training.session(0).stats().skipped_steps, 0u);
  while (cluster.sidecar(0).Reap().now > 0) std::this_thread::yield();
  EXPECT_EQ(LossScale(cluster).Value(), 0);
}

}  // namespace
}  // namespace thalweg::metrics_test
