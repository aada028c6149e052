// RoundGroup is a group of nodes as a RoundEngine keeps it.
#pragma once

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "core/base/layout.h"
#include "core/exchange/collective.h"

namespace thalweg {

// A RoundGroup is thread-compatible.
class RoundGroup {
 public:
  // A Seat is a node's place in the group.
  struct Seat {
    GroupMember member;
    bool is_lost = false;
    uint32_t outstanding = 0;  // contributions that are held
    uint64_t settled = 0;      // see Contribution
  };

  explicit RoundGroup(const Group& group);

  // Returns where seats() has the node, if it is a member.
  std::optional<size_t> Find(uint32_t node) const;
  // Returns the group as it was declared.
  Group Declared() const;

  // The group goes on without this member; false: it has already.
  bool SetLost(size_t seat);
  // The member has the results of all one-shot rounds up to `sequence`. Returns whether settled()
  // has changed.
  bool Settle(size_t seat, uint64_t sequence);
  // Members have one more window for this part; false: they have it already.
  bool AllowPart(uint32_t part);

  uint32_t id() const { return id_; }
  const std::vector<Seat>& seats() const { return seats_; }  // ascending by node
  Seat& seat(size_t i) { return seats_[i]; }
  uint32_t active() const { return active_; }  // members that are not lost
  // Returns the number up to which all active members have settled.
  uint64_t settled() const { return settled_; }
  // Return how many contributions of a member can be unanswered, of one part and altogether.
  uint32_t window_of_part() const { return window_of_part_; }
  uint64_t window() const { return uint64_t{window_of_part_} * parts_.count(); }

 private:
  void UpdateSettled();

  const uint32_t id_;
  std::vector<Seat> seats_;
  uint32_t active_;
  uint64_t settled_ = 0;
  const uint32_t declared_window_;
  const uint32_t window_of_part_;
  std::bitset<kMaxParts> parts_{1};
};

// Checks a group that a node declares in a job of `num_nodes`: InvalidArgument unless it has
// members in ascending order, each of which has workers, and another number than 0.
absl::Status CheckGroup(const Group& group, uint32_t num_nodes);

}  // namespace thalweg
