// What sidecars count of a job.
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "tests/integration/training.h"

namespace thalweg {
namespace {

constexpr uint64_t kRounds = 3;
// The first of several chunks, the second of one: those take ways of their own.
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
  // Both buckets of a node are under way at once, but time passes once.
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

}  // namespace
}  // namespace thalweg
