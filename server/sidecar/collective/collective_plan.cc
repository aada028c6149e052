#include "server/sidecar/collective/collective_plan.h"

#include <algorithm>
#include <map>
#include <utility>

namespace thalweg {
namespace {

Via HostedBy(uint32_t node) { return {Via::Kind::kHostedBy, node}; }
Via NotHostedBy(uint32_t node) { return {Via::Kind::kNotHostedBy, node}; }

// Makes the routes of one collective; see collective_kind.h.
class Planner {
 public:
  Planner(Fold fold, uint32_t root, const GroupPlaces& places)
      : fold_(fold), root_(root), places_(places) {}

  void AllReduce() { Add(Place::All(), Place::All(), {}, {{}}); }
  void Reduce() { Add(Place::All(), Place::One(Root()), NotHostedBy(Root()), {{}}); }
  void Broadcast() { Add(Place::One(Root()), Place::All(), NotHostedBy(Root()), {{root_, 0, 0}}); }
  void AllGather() {
    for (const GroupMember& member : places_.members()) {
      Add(Place::One(member.node), Place::All(), HostedBy(member.node), UnitsOf(member.node));
    }
  }
  void Gather() {
    for (const GroupMember& member : places_.members()) {
      Add(Place::One(member.node), Place::One(Root()), HostedBy(Root()), UnitsOf(member.node));
    }
  }
  void ReduceScatter() {
    for (const GroupMember& member : places_.members()) {
      Add(Place::All(), Place::One(member.node), HostedBy(member.node), UnitsFor(member.node, 0));
    }
  }
  void Scatter() {
    for (const GroupMember& member : places_.members()) {
      Add(Place::One(Root()), Place::One(member.node), HostedBy(member.node),
          UnitsFor(member.node, root_));
    }
  }
  void Barrier() { Add(Place::None(), Place::None(), {}, {}); }

  std::vector<Route> Take() { return std::move(routes_); }

 private:
  uint32_t Root() const { return places_.NodeOf(root_); }

  // Each worker of the node gives one unit, which becomes that of its rank.
  std::vector<Segment> UnitsOf(uint32_t node) const {
    std::vector<Segment> segments;
    for (const uint32_t giver : places_.RanksOn(node)) segments.push_back({giver, 0, giver});
    return segments;
  }
  // Each worker of the node gets the unit of its rank.
  std::vector<Segment> UnitsFor(uint32_t node, uint32_t giver) const {
    std::vector<Segment> segments;
    for (const uint32_t receiver : places_.RanksOn(node)) {
      segments.push_back({giver, receiver, segments.size()});
    }
    return segments;
  }

  void Add(Place from, Place to, Via via, std::vector<Segment> segments) {
    const bool one_node = places_.members().size() == 1;
    const bool stays = one_node || (from == to && from.kind == Place::Kind::kOne);
    routes_.push_back({{from, to, fold_}, via, std::move(segments), stays});
  }

  const Fold fold_;
  const uint32_t root_;
  const GroupPlaces& places_;
  std::vector<Route> routes_;
};

std::vector<Route> RoutesOf(CollectiveKind kind, Planner planner) {
  switch (kind) {
    case CollectiveKind::kAllReduce:
      planner.AllReduce();
      break;
    case CollectiveKind::kReduce:
      planner.Reduce();
      break;
    case CollectiveKind::kBroadcast:
      planner.Broadcast();
      break;
    case CollectiveKind::kAllGather:
      planner.AllGather();
      break;
    case CollectiveKind::kReduceScatter:
      planner.ReduceScatter();
      break;
    case CollectiveKind::kGather:
      planner.Gather();
      break;
    case CollectiveKind::kScatter:
      planner.Scatter();
      break;
    case CollectiveKind::kBarrier:
      planner.Barrier();
      break;
  }
  return planner.Take();
}

// Workers that get different units have them one after the other; others share the same ones.
bool HaveTheirOwn(CollectiveKind kind) {
  return kind == CollectiveKind::kReduceScatter || kind == CollectiveKind::kScatter;
}

}  // namespace

GroupPlaces::GroupPlaces(std::vector<uint32_t> nodes, uint32_t node)
    : nodes_(std::move(nodes)), node_(node), here_(RanksOn(node)) {
  std::map<uint32_t, uint32_t> workers;
  for (const uint32_t each : nodes_) ++workers[each];
  for (const auto& [number, count] : workers) members_.push_back({number, count});
}

std::vector<uint32_t> GroupPlaces::RanksOn(uint32_t node) const {
  std::vector<uint32_t> ranks;
  for (uint32_t rank = 0; rank < size(); ++rank) {
    if (nodes_[rank] == node) ranks.push_back(rank);
  }
  return ranks;
}

CollectivePlan PlanCollective(CollectiveKind kind, Fold fold, uint32_t root,
                              const GroupPlaces& places) {
  CollectivePlan plan;
  plan.routes = RoutesOf(kind, Planner(fold, root, places));
  for (const uint32_t rank : places.here()) {
    const uint64_t got = UnitsGot(kind, places.size(), rank == root);
    plan.offsets.push_back(HaveTheirOwn(kind) ? plan.result_units : 0);
    plan.result_units =
        HaveTheirOwn(kind) ? plan.result_units + got : std::max(plan.result_units, got);
  }
  return plan;
}

}  // namespace thalweg
