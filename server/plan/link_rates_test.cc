#include "server/plan/link_rates.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <vector>

namespace thalweg::link_rates_test {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

// The first `hosted` shards are on the first nodes; `extra` others have machines of their own.
std::vector<uint32_t> Hosts(uint32_t hosted, uint32_t extra) {
  std::vector<uint32_t> hosts(hosted + extra, kNoHost);
  std::iota(hosts.begin(), hosts.begin() + hosted, 0u);
  return hosts;
}

// Returns the rates that result when every measurement finds the slower of its two ends, times what
// `noise` returns for the number of the measurement.
template <typename Noise>
Links Measured(const Links& truth, Noise noise) {
  const auto nodes = static_cast<uint32_t>(truth.nodes.size());
  LinkRates rates(nodes, truth.hosts);
  int count = 0;
  for (uint32_t node = 0; node < nodes; ++node) {
    std::vector<double> measured(truth.hosts.size());
    for (const uint32_t shard : ShardsToMeasure(node, nodes, truth.hosts)) {
      const uint32_t host = truth.hosts[shard];
      const double end = host == kNoHost ? truth.shards[shard] : truth.nodes[host];
      measured[shard] = std::min(truth.nodes[node], end) * noise(count++);
    }
    rates.Add(node, measured);
  }
  return rates.Resolve();
}
Links Measured(const Links& truth) {
  return Measured(truth, [](int) { return 1.0; });
}

TEST(LinkRatesTest, WithoutHostsNodesTakeTurnsAndMissNoShard) {
  const std::vector<uint32_t> two = Hosts(0, 2);
  EXPECT_THAT(ShardsToMeasure(0, 4, two), ElementsAre(0));
  EXPECT_THAT(ShardsToMeasure(1, 4, two), ElementsAre(1));
  EXPECT_THAT(ShardsToMeasure(2, 4, two), ElementsAre(0));
  EXPECT_THAT(ShardsToMeasure(3, 4, two), ElementsAre(1));
  const std::vector<uint32_t> five = Hosts(0, 5);
  EXPECT_THAT(ShardsToMeasure(0, 2, five), ElementsAre(0, 2, 4));
  EXPECT_THAT(ShardsToMeasure(1, 2, five), ElementsAre(1, 3));
}

TEST(LinkRatesTest, HostingNodesFormARingAndOneChordEach) {
  EXPECT_THAT(ShardsToMeasure(0, 3, Hosts(3, 0)), ElementsAre(1));
  EXPECT_THAT(ShardsToMeasure(2, 3, Hosts(3, 0)), ElementsAre(0));
  EXPECT_THAT(ShardsToMeasure(1, 4, Hosts(4, 0)), ElementsAre(2, 3));
  EXPECT_THAT(ShardsToMeasure(3, 4, Hosts(4, 2)), ElementsAre(0, 4, 1));
  EXPECT_THAT(ShardsToMeasure(5, 8, Hosts(8, 0)), ElementsAre(6, 2));
}

TEST(LinkRatesTest, EveryLinkIsMeasuredButNobodysOwnShard) {
  for (uint32_t nodes = 1; nodes <= 9; ++nodes) {
    for (uint32_t hosted = 0; hosted <= nodes; ++hosted) {
      for (uint32_t extra = 0; extra <= 2 * nodes; ++extra) {
        if (hosted + extra == 0) continue;
        std::vector<uint32_t> hosts = Hosts(hosted, extra);
        // The last nodes are the hosts, which moves every shard away from its node's number.
        for (uint32_t k = 0; k < hosted; ++k) hosts[k] += nodes - hosted;
        std::set<uint32_t> seen;  // numbers of nodes, and of shards plus the number of nodes
        for (uint32_t node = 0; node < nodes; ++node) {
          std::set<uint32_t> own;
          for (const uint32_t shard : ShardsToMeasure(node, nodes, hosts)) {
            EXPECT_NE(hosts[shard], node);
            EXPECT_TRUE(own.insert(shard).second) << "twice";
            seen.insert({node, hosts[shard] == kNoHost ? nodes + shard : hosts[shard]});
          }
        }
        const bool is_embedded = nodes == 1 && extra == 0;
        EXPECT_EQ(seen.size(), is_embedded ? 0 : nodes + extra)
            << nodes << " nodes, " << hosted << " hosts, " << extra << " others";
      }
    }
  }
}

TEST(LinkRatesTest, NodeAloneWithItsShardHasNothingToMeasure) {
  EXPECT_THAT(ShardsToMeasure(0, 1, {0}), IsEmpty());
  const Links links = LinkRates(1, {0}).Resolve();
  EXPECT_THAT(links.nodes, ElementsAre(0));
}

TEST(LinkRatesTest, RequestWithoutHostsHasShardsOnMachinesOfTheirOwn) {
  JoinRequest request;
  request.num_shards = 2;
  EXPECT_THAT(HostsOf(request), ElementsAre(kNoHost, kNoHost));
  request.hosts = {1, kNoHost};
  EXPECT_EQ(HostsOf(request), request.hosts);
}

TEST(LinkRatesTest, NoiseDoesNotMakeEqualLinksUnequal) {
  const Links equal{std::vector<double>(6, 125e6), Hosts(6, 2), std::vector<double>(8, 125e6)};
  const Links links = Measured(equal, [](int i) { return 1 + 0.02 * (i % 7 - 3); });
  EXPECT_THAT(links.nodes, Each(links.nodes[0]));
  EXPECT_EQ(links.shards[6], links.nodes[0]);
  EXPECT_EQ(links.shards[7], links.nodes[0]);
  EXPECT_NEAR(links.nodes[0], 125e6, 0.06 * 125e6);
  const SharePlan plan = PlanShares(links);
  EXPECT_EQ(plan.shares, PlanShares(equal).shares);
}

TEST(LinkRatesTest, FastLinksMayDifferByFourMilliseconds) {
  // 4 MiB take 4 ms more at the first rate than at the second one.
  const double fast = 1.25e9;
  const double slower = 1 / (1 / fast + 3.99e-3 / (4 << 20));
  ASSERT_LT(slower, fast / 1.5);
  for (const bool is_fast : {true, false}) {
    const double scale = is_fast ? 1 : 0.1;
    LinkRates rates(2, Hosts(0, 2));
    rates.Add(0, std::vector<double>{scale * slower, 0});
    rates.Add(1, std::vector<double>{0, scale * fast});
    const Links links = rates.Resolve();
    EXPECT_EQ(links.shards[0] == links.shards[1], is_fast);
  }
}

TEST(LinkRatesTest, SlowNodeAndShardAreFound) {
  Links truth{std::vector<double>(5, 1e8), Hosts(5, 1), {0, 0, 0, 0, 0, 5e7}};
  truth.nodes[3] = 2.5e7;
  const Links links = Measured(truth);
  EXPECT_EQ(links.nodes, truth.nodes);
  EXPECT_EQ(links.shards[5], 5e7);
}

TEST(LinkRatesTest, FastNodeBetweenTwoSlowOnesIsFound) {
  for (const uint32_t nodes : {4u, 5u, 6u, 7u, 16u}) {
    Links truth{std::vector<double>(nodes, 1e8), Hosts(nodes, 0), std::vector<double>(nodes)};
    truth.nodes[0] = truth.nodes[2] = 2.5e7;
    EXPECT_EQ(Measured(truth).nodes, truth.nodes) << nodes;
  }
}

TEST(LinkRatesTest, NodesThatMeasureTheSameShardTogetherDoNotMakeItSlow) {
  LinkRates rates(4, Hosts(0, 2));
  rates.Add(0, std::vector<double>{5e7, 0});  // together with node 2
  rates.Add(1, std::vector<double>{0, 1e8});
  rates.Add(2, std::vector<double>{5e7, 0});
  rates.Add(3, std::vector<double>{0, 1e8});
  const Links links = rates.Resolve();
  EXPECT_EQ(links.shards[0], links.shards[1]);
  EXPECT_THAT(PlanShares(links).shares, Each(kShareTotal / 2));
}

TEST(LinkRatesTest, ShardThatIsSlowerThanThatIsFound) {
  LinkRates rates(4, Hosts(0, 2));
  for (const uint32_t node : {0u, 2u}) rates.Add(node, std::vector<double>{5e6, 0});
  for (const uint32_t node : {1u, 3u}) rates.Add(node, std::vector<double>{0, 1e8});
  const Links links = rates.Resolve();
  EXPECT_EQ(links.shards[0], 5e6);
  EXPECT_EQ(links.shards[1], 1e8);
}

TEST(LinkRatesTest, NodeThatHasMeasuredNothingIsUnknown) {
  LinkRates rates(2, Hosts(0, 2));
  rates.Add(0, std::vector<double>{1e8, 0});
  rates.Add(1, {});  // an older node
  EXPECT_THAT(rates.Resolve().nodes, ElementsAre(1e8, 0));
}

}  // namespace
}  // namespace thalweg::link_rates_test
