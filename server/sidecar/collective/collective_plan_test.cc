#include "server/sidecar/collective/collective_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

namespace thalweg::collective_plan_test {
namespace {

constexpr CollectiveKind kKinds[] = {CollectiveKind::kAllReduce,    CollectiveKind::kReduce,
                                     CollectiveKind::kBroadcast,    CollectiveKind::kAllGather,
                                     CollectiveKind::kGather,       CollectiveKind::kScatter,
                                     CollectiveKind::kReduceScatter};

Fold FoldFor(CollectiveKind kind) { return Folds(kind) ? Fold::kSum : Fold::kNone; }

// A unit's value tells its giver and its number there; a fold adds.
uint64_t Value(uint32_t giver, uint64_t unit) { return 1000 * (giver + 1) + unit; }

// Carries out the plans of all nodes as collective_kind.h describes them; returns what each rank
// gets.
std::vector<std::vector<uint64_t>> CarryOut(CollectiveKind kind, uint32_t root,
                                            const std::vector<uint32_t>& nodes) {
  std::map<uint32_t, std::vector<uint64_t>> results;  // by node
  std::map<uint32_t, CollectivePlan> plans;
  std::map<uint32_t, GroupPlaces> places;
  for (const uint32_t node : nodes) {
    if (places.contains(node)) continue;
    const auto& here = places.emplace(node, GroupPlaces(nodes, node)).first->second;
    plans[node] = PlanCollective(kind, FoldFor(kind), root, here);
    results[node].resize(plans[node].result_units);
  }
  const CollectivePlan& first = plans.begin()->second;
  for (size_t r = 0; r < first.routes.size(); ++r) {
    for (const auto& [node, plan] : plans) {
      const Route& route = plan.routes.at(r);
      EXPECT_EQ(route, first.routes[r]) << "node " << node;
      for (const Segment& segment : route.segments) {
        uint64_t value = 0;
        if (Folds(kind)) {
          for (uint32_t giver = 0; giver < nodes.size(); ++giver) {
            value += Value(giver, segment.given);
          }
        } else {
          value = Value(segment.giver, segment.given);
          EXPECT_TRUE(route.what.from.Has(nodes[segment.giver]));
        }
        if (route.what.to.Has(node) && plan.result_units > 0) {
          results[node].at(segment.got) = value;
        }
      }
    }
  }
  std::vector<std::vector<uint64_t>> got(nodes.size());
  for (uint32_t rank = 0; rank < nodes.size(); ++rank) {
    const CollectivePlan& plan = plans[nodes[rank]];
    const auto& here = places.at(nodes[rank]).here();
    const auto place = std::find(here.begin(), here.end(), rank) - here.begin();
    const uint64_t begin = plan.offsets[static_cast<size_t>(place)];
    const uint64_t units = UnitsGot(kind, static_cast<uint32_t>(nodes.size()), rank == root);
    for (uint64_t u = 0; u < units; ++u) got[rank].push_back(results[nodes[rank]].at(begin + u));
  }
  return got;
}

std::vector<uint64_t> Expected(CollectiveKind kind, uint32_t root, uint32_t rank, uint32_t size) {
  const auto sum = [&](uint64_t unit) {
    uint64_t total = 0;
    for (uint32_t giver = 0; giver < size; ++giver) total += Value(giver, unit);
    return total;
  };
  std::vector<uint64_t> all;
  for (uint32_t giver = 0; giver < size; ++giver) all.push_back(Value(giver, 0));
  switch (kind) {
    case CollectiveKind::kAllReduce:
      return {sum(0)};
    case CollectiveKind::kReduce:
      return rank == root ? std::vector{sum(0)} : std::vector<uint64_t>{};
    case CollectiveKind::kBroadcast:
      return rank == root ? std::vector<uint64_t>{} : std::vector{Value(root, 0)};
    case CollectiveKind::kAllGather:
      return all;
    case CollectiveKind::kGather:
      return rank == root ? all : std::vector<uint64_t>{};
    case CollectiveKind::kReduceScatter:
      return {sum(rank)};
    case CollectiveKind::kScatter:
      return {Value(root, rank)};
    case CollectiveKind::kBarrier:
      return {};
  }
  return {};
}

TEST(CollectivePlanTest, EveryRankGetsWhatTheCollectivePromisesWhereverTheRanksAre) {
  const std::vector<std::vector<uint32_t>> layouts = {{0},          {3, 3, 3},       {0, 1},
                                                      {0, 0, 1, 1}, {0, 1, 0, 1, 2}, {2, 0, 0}};
  for (const auto& nodes : layouts) {
    const auto size = static_cast<uint32_t>(nodes.size());
    for (const CollectiveKind kind : kKinds) {
      for (uint32_t root = 0; root < size; ++root) {
        const auto got = CarryOut(kind, root, nodes);
        for (uint32_t rank = 0; rank < size; ++rank) {
          EXPECT_EQ(got[rank], Expected(kind, root, rank, size))
              << Name(kind) << " at root " << root << ", rank " << rank << " of " << size;
        }
      }
    }
  }
}

TEST(CollectivePlanTest, NothingLeavesANodeThatGoesToItself) {
  for (const CollectiveKind kind : kKinds) {
    for (const Route& route :
         PlanCollective(kind, FoldFor(kind), 0, GroupPlaces({4, 4}, 4)).routes) {
      EXPECT_TRUE(route.stays) << Name(kind);
    }
  }
  uint32_t stay = 0;
  const GroupPlaces places({0, 1, 2}, 0);
  const CollectivePlan plan = PlanCollective(CollectiveKind::kScatter, Fold::kNone, 0, places);
  for (const Route& route : plan.routes) {
    EXPECT_EQ(route.stays, route.what.from == route.what.to);
    stay += route.stays ? 1 : 0;
  }
  EXPECT_EQ(plan.routes.size(), 3u);
  EXPECT_EQ(stay, 1u);
}

TEST(CollectivePlanTest, RoutesGoThroughTheShardThatLoadsLinksLeast) {
  const GroupPlaces places({0, 1, 2}, 0);
  const auto via = [&](CollectiveKind kind) {
    std::vector<Via> all;
    for (const Route& route : PlanCollective(kind, FoldFor(kind), 1, places).routes) {
      all.push_back(route.via);
    }
    return all;
  };
  using enum Via::Kind;
  EXPECT_EQ(via(CollectiveKind::kAllReduce), std::vector({Via{kAny, 0}}));
  EXPECT_EQ(via(CollectiveKind::kReduce), std::vector({Via{kNotHostedBy, 1}}));
  EXPECT_EQ(via(CollectiveKind::kBroadcast), std::vector({Via{kNotHostedBy, 1}}));
  const std::vector<Via> each = {{kHostedBy, 0}, {kHostedBy, 1}, {kHostedBy, 2}};
  EXPECT_EQ(via(CollectiveKind::kAllGather), each);
  EXPECT_EQ(via(CollectiveKind::kReduceScatter), each);
  EXPECT_EQ(via(CollectiveKind::kScatter), each);
  EXPECT_EQ(via(CollectiveKind::kGather), std::vector(3, Via{kHostedBy, 1}));
}

TEST(CollectivePlanTest, ABarrierCarriesNothing) {
  const auto plan =
      PlanCollective(CollectiveKind::kBarrier, Fold::kNone, 0, GroupPlaces({0, 1}, 1));
  ASSERT_EQ(plan.routes.size(), 1u);
  EXPECT_EQ(plan.routes[0].what, (Collective{Place::None(), Place::None(), Fold::kNone}));
  EXPECT_TRUE(plan.routes[0].segments.empty());
  EXPECT_EQ(plan.result_units, 0u);
}

}  // namespace
}  // namespace thalweg::collective_plan_test
