#include "core/base/metrics.h"

#include <gtest/gtest.h>

#include <vector>

#include "core/base/thread.h"

namespace thalweg {
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

}  // namespace
}  // namespace thalweg
