// A CollectivePlan says which values of a collective cross the network, and where they go. Every
// node computes it alike from the group alone.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "core/base/collective_kind.h"
#include "core/base/fold.h"
#include "core/exchange/collective.h"

namespace thalweg {

// The workers of a group, as a node sees it. Ranks are those in the group.
class GroupPlaces {
 public:
  // `nodes` has each rank's node; `node` is this one.
  GroupPlaces(std::vector<uint32_t> nodes, uint32_t node);

  uint32_t size() const { return static_cast<uint32_t>(nodes_.size()); }
  uint32_t node() const { return node_; }
  uint32_t NodeOf(uint32_t rank) const { return nodes_[rank]; }
  const std::vector<uint32_t>& nodes() const { return nodes_; }
  // The ranks on this node, and on any one; ascending.
  const std::vector<uint32_t>& here() const { return here_; }
  std::vector<uint32_t> RanksOn(uint32_t node) const;
  // The group's nodes with the numbers of their workers, ascending.
  const std::vector<GroupMember>& members() const { return members_; }

 private:
  const std::vector<uint32_t> nodes_;
  const uint32_t node_;
  std::vector<uint32_t> here_;
  std::vector<GroupMember> members_;
};

// Routes are through the shard that a node hosts, if it hosts one; through any but a node's, if
// there are others; or through all, by their shares.
struct Via {
  enum class Kind : uint8_t { kAny, kHostedBy, kNotHostedBy };

  bool operator==(const Via&) const = default;

  Kind kind = Kind::kAny;
  uint32_t node = 0;  // unless kAny
};

// A Segment is one unit of a route's values.
struct Segment {
  uint32_t giver = 0;  // whose values pass; 0 with a fold, which takes the values of all
  uint64_t given = 0;  // its number among the units that a giver gives
  uint64_t got = 0;    // its number in the result of a node that gets it

  bool operator==(const Segment&) const = default;
};

// A Route is what goes from one place to another in the rounds of one Collective.
struct Route {
  Collective what;
  Via via;
  std::vector<Segment> segments;  // one after the other; none in a barrier
  bool stays = false;             // from a node to itself: the network is not used

  bool operator==(const Route&) const = default;
};

struct CollectivePlan {
  std::vector<Route> routes;
  uint64_t result_units = 0;      // that this node's workers get together
  std::vector<uint64_t> offsets;  // by place in here(): where each worker's begin
};

// `root` is a rank of the group. `fold` is kNone unless Folds(kind).
CollectivePlan PlanCollective(CollectiveKind kind, Fold fold, uint32_t root,
                              const GroupPlaces& places);

}  // namespace thalweg
