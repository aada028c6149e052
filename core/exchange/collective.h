// A Collective says what a round does: from which nodes of its group it takes values, how it folds
// them, and which nodes get the result.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "core/base/collective_kind.h"
#include "core/base/fold.h"
#include "core/base/wire_format.h"

namespace thalweg {

// A Place is all nodes of a group, one of them, or none.
struct Place {
  enum class Kind : uint8_t { kAll = 0, kOne = 1, kNone = 2 };

  static constexpr Place All() { return {}; }
  static constexpr Place One(uint32_t node) { return {Kind::kOne, node}; }
  static constexpr Place None() { return {Kind::kNone, 0}; }

  // `node` is a node of the group.
  constexpr bool Has(uint32_t node) const {
    return kind == Kind::kAll || (kind == Kind::kOne && node == this->node);
  }
  bool operator==(const Place&) const = default;

  Kind kind = Kind::kAll;
  uint32_t node = 0;  // with kOne: its number in the job; 0 otherwise
};

// All nodes of the group take part in each of its rounds, and each contributes once. One from which
// nothing is wanted contributes an empty payload, which says that it is ready; one that gets no
// result gets an empty payload, a receipt, when all have contributed.
struct Collective {
  bool operator==(const Collective&) const = default;

  Place from;
  Place to;
  Fold fold = Fold::kMean;
};

inline constexpr Collective kMeanOfAll{};
// Nodes say that they are ready for what the shard has.
inline constexpr Collective kPull{Place::None(), Place::All(), Fold::kNone};

// Returns e.g. "mean from all to all", "sum from all to node 3", "bytes from node 0 to all" or
// "bytes from none to none".
std::string ToString(const Collective& collective);

// Checks, for values that may come from outside, that there is such a collective in this format:
// a fold takes values from all and gives its result to all or to one; without a fold, the bytes of
// one go to all or to one, or there are none, as in a barrier, or the shard's own go to all. Lossy
// formats have only the mean, integers all but the mean, and floats all but the bitwise folds.
// Returns InvalidArgument that says what cannot be.
absl::Status Validate(const Collective& collective, WireFormat wire);

// Returns a number for what the workers of a group have called together; `root` is a rank of
// theirs.
constexpr uint64_t CallOf(CollectiveKind kind, uint32_t root) {
  return uint64_t{static_cast<uint8_t>(kind)} << 32 | root;
}
// Returns e.g. "broadcast at root 1"; `call` may come from outside.
std::string CallText(uint64_t call);

inline constexpr uint32_t kLeastWindow = 2;

struct GroupMember {
  uint32_t node = 0;
  uint32_t workers = 0;

  bool operator==(const GroupMember&) const = default;
};

// A Group is the nodes that take part in a round. Group 0 is all nodes of the job.
struct Group {
  uint32_t id = 0;
  std::vector<GroupMember> members = {};  // ascending by node
  // At each shard, a node of the group may have this many contributed chunks without a result; at
  // least kLeastWindow are allowed.
  uint32_t window_chunks = 0;

  bool operator==(const Group&) const = default;
};

// Returns e.g. "group 3 (node 0 with 2 workers, node 4 with 1 worker)".
std::string ToString(const Group& group);

}  // namespace thalweg
