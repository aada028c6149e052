#include "server/plan/share_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>
#include <vector>

#include "core/base/shard_place.h"

namespace thalweg::share_plan_test {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

// Returns the seconds for each byte of gradient, by counting what every machine sends and receives
// when each node exchanges its part with each shard.
double CountedSeconds(const Links& links, const std::vector<double>& shares) {
  const size_t nodes = links.nodes.size();
  std::vector<double> sent(nodes + shares.size()), received(sent.size());
  for (size_t k = 0; k < shares.size(); ++k) {
    const size_t server = links.hosts[k] == kNoHost ? nodes + k : links.hosts[k];
    for (size_t node = 0; node < nodes; ++node) {
      if (node == server) continue;
      sent[node] += shares[k];
      received[server] += shares[k];
      sent[server] += shares[k];
      received[node] += shares[k];
    }
  }
  double seconds = 0;
  for (size_t i = 0; i < sent.size(); ++i) {
    if (sent[i] == 0) continue;  // it may be a shard that a node hosts
    const double rate = i < nodes ? links.nodes[i] : links.shards[i - nodes];
    seconds = std::max({seconds, sent[i] / rate, received[i] / rate});
  }
  return seconds;
}

std::vector<double> PartsOf(const SharePlan& plan) {
  std::vector<double> parts;
  for (const uint32_t share : plan.shares) parts.push_back(1.0 * share / kShareTotal);
  return parts;
}

// Calls `visit` with all shares of `count` shards that are multiples of 1/steps.
void ForEachGridPoint(size_t count, int steps, std::vector<double>& head, int left,
                      const std::function<void(const std::vector<double>&)>& visit) {
  if (head.size() + 1 == count) {
    head.push_back(1.0 * left / steps);
    visit(head);
    head.pop_back();
    return;
  }
  for (int i = 0; i <= left; ++i) {
    head.push_back(1.0 * i / steps);
    ForEachGridPoint(count, steps, head, left - i, visit);
    head.pop_back();
  }
}

double LeastOnGrid(const Links& links, int steps) {
  double least = std::numeric_limits<double>::infinity();
  std::vector<double> head;
  ForEachGridPoint(links.hosts.size(), steps, head, steps, [&](const std::vector<double>& shares) {
    least = std::min(least, CountedSeconds(links, shares));
  });
  return least;
}

// Every node hosts a shard, and there are `extra` others; all rates are `rate`.
Links EqualLinks(uint32_t nodes, uint32_t extra, double rate) {
  Links links{std::vector<double>(nodes, rate), std::vector<uint32_t>(nodes + extra, kNoHost),
              std::vector<double>(nodes + extra, rate)};
  std::iota(links.hosts.begin(), links.hosts.begin() + nodes, 0u);
  return links;
}

TEST(SharePlanTest, EqualLinksTakeWhatTheFormulaSays) {
  constexpr double kRate = 125e6;
  for (uint32_t n = 2; n <= 8; ++n) {
    for (uint32_t k = 0; k <= n; ++k) {
      const SharePlan plan = PlanShares(EqualLinks(n, k, kRate));
      const double expected = 2.0 * n * (n - 1) / (n * n + k * n - 2.0 * k) / kRate;
      // Each share is off by less than 1/kShareTotal, and a link carries it at most n times.
      const double rounding = 1.0 * n / kShareTotal / kRate;
      EXPECT_NEAR(plan.forecast.seconds_per_byte, expected, rounding) << n << " nodes, " << k;
      EXPECT_NEAR(plan.forecast.ring_seconds_per_byte, 2.0 * (n - 1) / n / kRate, 1e-15);
      EXPECT_EQ(std::accumulate(plan.shares.begin(), plan.shares.end(), 0u), kShareTotal);
    }
  }
}

TEST(SharePlanTest, NoSharesOnAGridAreBetter) {
  constexpr double k = 1e6;
  const std::vector<Links> cases = {
      {{8 * k, 8 * k, 8 * k}, {0, 1, 2}, {0, 0, 0}},
      {{8 * k, 2 * k, 5 * k}, {0, 1, 2}, {0, 0, 0}},
      {{8 * k, 7 * k, 9 * k}, {0, 1, 2, kNoHost}, {0, 0, 0, 3 * k}},
      {{8 * k, 7 * k, 9 * k, 4 * k}, {2, kNoHost, kNoHost}, {0, 20 * k, 6 * k}},
      {{8 * k, 8 * k}, {kNoHost, kNoHost, kNoHost}, {8 * k, k, 3 * k}},
      {{8 * k, 8 * k, 6 * k, 5 * k, 7 * k}, {kNoHost, 4, 1, kNoHost}, {9 * k, 0, 0, 7 * k}},
      {{8 * k, 4 * k}, {0, 1, kNoHost}, {0, 0, k}},
      {{8 * k}, {kNoHost, kNoHost}, {2 * k, 5 * k}},
      {{8 * k}, {0, kNoHost}, {0, 5 * k}},
  };
  for (size_t i = 0; i < cases.size(); ++i) {
    const Links& links = cases[i];
    const SharePlan plan = PlanShares(links);
    const double rounding = 5.0 / kShareTotal / k;  // at most 5 nodes and a rate of at least k
    const double counted = CountedSeconds(links, PartsOf(plan));
    EXPECT_NEAR(plan.forecast.seconds_per_byte, counted, 1e-6 * counted) << i;
    EXPECT_LE(counted, LeastOnGrid(links, 30) + rounding) << i;
  }
}

// Returns what docs/placement.md gives for n equal nodes that host shards and k aggregators like
// them, in units of the time in which a link carries the gradient.
double Formula(double n, double k) { return 2 * n * (n - 1) / (n * n + k * n - 2 * k); }

TEST(SharePlanTest, AdviceIsOneMoreAggregatorUntilThereAreAsManyAsNodes) {
  constexpr double kRate = 125e6;
  for (uint32_t n = 3; n <= 8; ++n) {
    for (uint32_t k = 0; k < n; ++k) {
      const ShareForecast forecast = PlanShares(EqualLinks(n, k, kRate)).forecast;
      EXPECT_EQ(forecast.advice, Advice::kAggregator) << n << " nodes, " << k;
      const double rounding = 1.0 * n / kShareTotal / kRate;
      EXPECT_NEAR(forecast.advised_seconds_per_byte, Formula(n, k + 1) / kRate, rounding);
    }
    const ShareForecast forecast = PlanShares(EqualLinks(n, n, kRate)).forecast;
    EXPECT_EQ(forecast.advice, Advice::kFewerBytes) << n;
    EXPECT_EQ(forecast.advised_seconds_per_byte, 0) << n;
  }
}

TEST(SharePlanTest, AdviceWithoutLocalShardsIsWhatHelpsMore) {
  constexpr double kRate = 1e8;
  for (uint32_t n = 2; n <= 8; ++n) {
    for (uint32_t k = 1; k <= n; ++k) {
      const Links links{std::vector<double>(n, kRate), std::vector<uint32_t>(k, kNoHost),
                        std::vector<double>(k, kRate)};
      const ShareForecast forecast = PlanShares(links).forecast;
      const double rounding = 1.0 * n / kShareTotal / kRate;
      EXPECT_NEAR(forecast.seconds_per_byte, 1.0 * n / k / kRate, rounding);
      const double aggregator = std::max(1.0, n / (k + 1.0));
      const double local = Formula(n, k);
      if (k == n) {
        EXPECT_EQ(forecast.advice, Advice::kFewerBytes) << n;
        continue;
      }
      const bool hosting = local <= aggregator + 1e-9;  // they are equal for two nodes
      EXPECT_EQ(forecast.advice, hosting ? Advice::kLocalShards : Advice::kAggregator)
          << n << " nodes, " << k;
      EXPECT_NEAR(forecast.advised_seconds_per_byte, std::min(local, aggregator) / kRate, rounding);
    }
  }
}

TEST(SharePlanTest, AdvisedAggregatorIsLikeTheMedianOne) {
  // In t seconds for each byte an aggregator of rate r sums t r / 4. With a fourth of 5e7, t would
  // be 4 / 3.5e8. A node sums (1e8 t - 1) / 2, so that with all of them 2e8 t - 2 + 3e8 t / 4 = 1.
  const Links links{{1e8, 1e8, 1e8, 1e8}, {kNoHost, kNoHost, kNoHost}, {2e8, 5e7, 5e7}};
  const double rounding = 4.0 / kShareTotal / 5e7;
  const ShareForecast forecast = PlanShares(links).forecast;
  EXPECT_NEAR(forecast.seconds_per_byte, 4 / 3e8, rounding);
  EXPECT_EQ(forecast.advice, Advice::kLocalShards);
  EXPECT_NEAR(forecast.advised_seconds_per_byte, 3 / 2.75e8, rounding);
  // The next aggregator adds 5e7 t / 4.
  const Links hosted{
      {1e8, 1e8, 1e8, 1e8}, {0, 1, 2, 3, kNoHost, kNoHost, kNoHost}, {0, 0, 0, 0, 2e8, 5e7, 5e7}};
  const ShareForecast more = PlanShares(hosted).forecast;
  EXPECT_NEAR(more.seconds_per_byte, 3 / 2.75e8, rounding);
  EXPECT_EQ(more.advice, Advice::kAggregator);
  EXPECT_NEAR(more.advised_seconds_per_byte, 3 / 2.875e8, rounding);
}

TEST(SharePlanTest, NoShardHelpsASlowNode) {
  Links links = EqualLinks(4, 0, 1e8);
  links.nodes[2] = 25e6;
  EXPECT_EQ(PlanShares(links).forecast.advice, Advice::kFewerBytes);
}

TEST(SharePlanTest, NodeAloneGetsNoAdvice) {
  EXPECT_EQ(PlanShares({{1e8}, {kNoHost}, {2e7}}).forecast.advice, Advice::kNone);
}

TEST(SharePlanTest, EqualShardsGetExactlyEqualShares) {
  for (uint32_t k = 1; k <= 16; ++k) {
    const Links known{
        {3e6, 3e6, 3e6}, std::vector<uint32_t>(k, kNoHost), std::vector<double>(k, 1e6)};
    EXPECT_THAT(PlanShares(known).shares, Each(kShareTotal / k)) << k;
  }
  EXPECT_THAT(PlanShares(EqualLinks(6, 0, 1e8)).shares, Each(kShareTotal / 6));
  EXPECT_THAT(PlanShares(EqualLinks(2, 0, 1e8)).shares, Each(kShareTotal / 2));
}

TEST(SharePlanTest, WithoutHostsSharesAreProportionalToTheRates) {
  const Links links{{1e9, 1e9}, {kNoHost, kNoHost, kNoHost}, {1e6, 3e6, 6e6}};
  EXPECT_THAT(PlanShares(links).shares,
              ElementsAre(kShareTotal / 10, 3 * kShareTotal / 10, 6 * kShareTotal / 10));
}

TEST(SharePlanTest, SlowNodeHostsNothingAndIsNamed) {
  Links links = EqualLinks(4, 0, 1e8);
  links.nodes[2] = 25e6;
  const SharePlan plan = PlanShares(links);
  // Its link carries the gradient once anyway, and that takes as long as everything else may.
  EXPECT_EQ(plan.shares[2], 0u);
  EXPECT_EQ(plan.shares[0], kShareTotal / 3);
  const double seconds = 1 / 25e6;
  EXPECT_DOUBLE_EQ(plan.forecast.seconds_per_byte, seconds);
  EXPECT_DOUBLE_EQ(plan.forecast.ring_seconds_per_byte, 1.5 * seconds);
  EXPECT_FALSE(plan.forecast.at_shard);
  EXPECT_EQ(plan.forecast.number, 2u);
  EXPECT_EQ(plan.forecast.load, 1);
}

TEST(SharePlanTest, NodeAloneKeepsEverything) {
  EXPECT_THAT(PlanShares({{1e8}, {kNoHost, 0}, {1e9, 0}}).shares, ElementsAre(0, kShareTotal));
}

TEST(SharePlanTest, UnknownRateMakesSharesEqualWithoutAForecast) {
  const std::vector<Links> cases = {
      {{0, 1e6, 1e6}, {0, 1, kNoHost}, {0, 0, 1e6}},
      {{1e6, 1e6, 1e6}, {0, 1, kNoHost}, {0, 0, 0}},
      {{0, 0}, {kNoHost, kNoHost, kNoHost}, {0, 0, 0}},
  };
  for (const Links& links : cases) {
    const SharePlan plan = PlanShares(links);
    EXPECT_THAT(plan.shares, Each(kShareTotal / 3));
    EXPECT_EQ(plan.forecast, ShareForecast());
  }
}

TEST(SharePlanTest, WhateverWasMeasuredTheSharesSumUp) {
  using Limits = std::numeric_limits<double>;
  const std::vector<double> rates = {Limits::denorm_min(), 1e-300, 1, 1e9, Limits::max(),
                                     Limits::infinity()};
  for (const double a : rates) {
    for (const double b : rates) {
      for (const double c : rates) {
        const SharePlan plan = PlanShares({{a, b, c}, {1, 2, kNoHost}, {0, 0, a}});
        EXPECT_EQ(std::accumulate(plan.shares.begin(), plan.shares.end(), uint64_t{0}),
                  kShareTotal);
        EXPECT_LT(plan.forecast.seconds_per_byte, Limits::infinity());
        EXPECT_LT(plan.forecast.advised_seconds_per_byte, Limits::infinity());
      }
    }
  }
}

TEST(SharePlanTest, DescriptionNamesSharesTimeTheBusiestLinkAndWhatWouldHelp) {
  const Links few{{1e8, 1e8, 1e8, 1e8, 1e8}, {kNoHost, kNoHost}, {1e8, 1e8}};
  EXPECT_EQ(Describe(PlanShares(few)),
            "2 shards sum equal shares; 100 MB take 2.5 s, 1.56 times as long as in a ring; shard "
            "0's link carries 2.5 times the gradient; with a shard on every node "
            "(THALWEG_LOCAL_SHARDS=1) 100 MB would take 1.29 s");
  EXPECT_EQ(Describe(PlanShares(EqualLinks(4, 0, 1e8))),
            "4 shards sum equal shares; 100 MB take 1.5 s, as long as in a ring; node 0's "
            "link carries 1.5 times the gradient; with one more aggregator 100 MB would take 1.33 "
            "s");
  Links slow = EqualLinks(3, 1, 1e8);
  slow.nodes[1] = 2.5e7;
  EXPECT_THAT(Describe(PlanShares(slow)),
              AllOf(HasSubstr("shares of the shards: 40.9 %, 0 %, 40.9 %, 18.2 %; "),
                    HasSubstr("; 100 MB take 4 s, 0.75 times as long as in a ring; node 1's link "
                              "carries the gradient once; a codec that sends less, or a faster "
                              "link, would help")));
}

TEST(SharePlanTest, DescriptionWithoutAForecastSaysOnlyTheShares) {
  EXPECT_EQ(Describe({{1, 3}, {}}), "shares of the shards: 25 %, 75 %");
  EXPECT_EQ(Describe({{7}, {}}), "one shard sums everything");
  std::vector<uint32_t> many(100, 10);
  many[3] = 20;
  EXPECT_THAT(Describe({many, {}}),
              AllOf(HasSubstr("shares of the 100 shards: 0.99 % to 1.98 %"), Not(HasSubstr(","))));
}

}  // namespace
}  // namespace thalweg::share_plan_test
