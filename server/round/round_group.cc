#include "server/round/round_group.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"

namespace thalweg {

RoundGroup::RoundGroup(const Group& group)
    : id_(group.id),
      active_(static_cast<uint32_t>(group.members.size())),
      declared_window_(group.window_chunks),
      // A job may be given the smallest windows; nothing else has to pass them.
      window_of_part_(group.id == 0 ? group.window_chunks
                                    : std::max(group.window_chunks, kLeastWindow)) {
  for (const GroupMember& member : group.members) seats_.push_back({.member = member});
}

std::optional<size_t> RoundGroup::Find(uint32_t node) const {
  const auto found =
      std::lower_bound(seats_.begin(), seats_.end(), node,
                       [](const Seat& seat, uint32_t n) { return seat.member.node < n; });
  if (found == seats_.end() || found->member.node != node) return std::nullopt;
  return static_cast<size_t>(found - seats_.begin());
}

Group RoundGroup::Declared() const {
  Group group{id_, {}, declared_window_};
  for (const Seat& seat : seats_) group.members.push_back(seat.member);
  return group;
}

bool RoundGroup::SetLost(size_t seat) {
  if (seats_[seat].is_lost) return false;
  seats_[seat].is_lost = true;
  --active_;
  UpdateSettled();
  return true;
}

bool RoundGroup::Settle(size_t seat, uint64_t sequence) {
  if (sequence <= seats_[seat].settled) return false;
  seats_[seat].settled = sequence;
  const uint64_t before = settled_;
  UpdateSettled();
  return settled_ != before;
}

bool RoundGroup::AllowPart(uint32_t part) {
  if (parts_.test(part)) return false;
  parts_.set(part);
  return true;
}

void RoundGroup::UpdateSettled() {
  settled_ = std::numeric_limits<uint64_t>::max();
  for (const Seat& seat : seats_) {
    if (!seat.is_lost) settled_ = std::min(settled_, seat.settled);
  }
}

absl::Status CheckGroup(const Group& group, uint32_t num_nodes) {
  const auto refused = [&](const std::string& why) {
    return absl::InvalidArgumentError(absl::StrCat(ToString(group), ": ", why));
  };
  if (group.id == 0) return refused("group 0 is all nodes of the job");
  if (group.members.empty()) return refused("expected at least one node");
  const GroupMember* before = nullptr;
  for (const GroupMember& member : group.members) {
    if (before != nullptr && before->node >= member.node) {
      return refused("expected nodes in ascending order");
    }
    if (member.node >= num_nodes) {
      return refused(absl::StrCat("the job has ", num_nodes, " nodes"));
    }
    if (member.workers == 0) return refused("expected nodes with workers");
    before = &member;
  }
  return absl::OkStatus();
}

}  // namespace thalweg
