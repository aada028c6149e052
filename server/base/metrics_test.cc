#include "server/base/metrics.h"

#include <gtest/gtest.h>

#include <vector>

#include "core/base/thread.h"

namespace thalweg::metrics_test {
namespace {

TEST(MetricsTest, SameNameAndLabelsAreOneCounter) {
  MetricRegistry registry;
  registry.GetCounter("a_total", "help", {{"k", "1"}}).Add(2);
  registry.GetCounter("a_total", "ignored", {{"k", "1"}}).Add(3);
  registry.GetCounter("a_total", "ignored", {{"k", "2"}}).Add(7);
  const auto families = registry.Snapshot();
  ASSERT_EQ(families.size(), 1u);
  EXPECT_EQ(families[0].help, "help");
  ASSERT_EQ(families[0].samples.size(), 2u);
  EXPECT_EQ(families[0].samples[0].value, 5);
  EXPECT_EQ(families[0].samples[1].value, 7);
}

TEST(MetricsTest, GaugeIsClearedByWhomeverHasShownItsValueOnly) {
  Gauge gauge;
  const int first = 0, second = 0;
  gauge.Show(3, &first);
  gauge.Show(5, &second);
  gauge.Clear(&first);
  EXPECT_EQ(gauge.Value(), 5);
  gauge.Clear(&second);
  EXPECT_EQ(gauge.Value(), 0);
}

TEST(MetricsTest, ConcurrentAdditionsAllCount) {
  MetricRegistry registry;
  {
    std::vector<Thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back("adder", [&registry] {
        for (int k = 0; k < 10000; ++k) registry.GetCounter("n_total", "").Add();
      });
    }
  }
  EXPECT_EQ(registry.GetCounter("n_total", "").Value(), 40000);
}

// The test writes the bounds out: 0.1 ms, 0.2 ms, 0.4 ms is the third, and so on.
TEST(MetricsTest, HistogramCountsUpToAndWithEachBound) {
  Histogram histogram;
  for (const double seconds : {0.0, 1e-4, 1.0001e-4, 4e-4, 26.2, 26.3, 1e9}) {
    histogram.Observe(seconds);
  }
  EXPECT_EQ(histogram.Count(0), 2u);
  EXPECT_EQ(histogram.Count(1), 1u);
  EXPECT_EQ(histogram.Count(2), 1u);
  EXPECT_EQ(histogram.Count(18), 1u);
  EXPECT_EQ(histogram.Count(19), 2u);
  EXPECT_DOUBLE_EQ(histogram.Sum(), 1e-4 + 1.0001e-4 + 4e-4 + 26.2 + 26.3 + 1e9);
}

TEST(MetricsTest, ConcurrentObservationsAllCount) {
  MetricRegistry registry;
  {
    std::vector<Thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back("observer", [&registry] {
        for (int k = 0; k < 10000; ++k) registry.GetHistogram("t_seconds", "").Observe(0.25);
      });
    }
  }
  const auto families = registry.Snapshot();
  ASSERT_EQ(families.size(), 1u);
  EXPECT_EQ(families[0].kind, MetricRegistry::Kind::kHistogram);
  const MetricRegistry::Sample& sample = families[0].samples.at(0);
  EXPECT_EQ(sample.value, 10000);
  EXPECT_EQ(sample.counts.size(), Histogram::kBounds + 1);
  EXPECT_EQ(sample.counts[12], 40000u);  // (0.2048, 0.4096]
}

}  // namespace
}  // namespace thalweg::metrics_test
