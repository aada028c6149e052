#include "server/round/held_round.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace thalweg {

HeldRound::HeldRound(uint32_t node, const Contribution& first, size_t seats, Duration timeout,
                     TimePoint now, bool counts)
    : first_(node),
      group_(first.group),
      collective_(first.collective),
      settings_(first.settings),
      wire_(first.wire),
      elems_(first.elems),
      timeout_(timeout),
      opened_(now),
      counts_(counts),
      latest_(now),
      held_(seats) {}

absl::Status HeldRound::CheckSame(uint32_t node, const Contribution& c) const {
  const auto differs = [&](const char* what, const auto& theirs, const auto& ours) {
    return absl::InvalidArgumentError(absl::StrCat(ToString(c.id), ": node ", node, " says its ",
                                                   what, " is ", theirs, ", node ", first_,
                                                   " says ", ours));
  };
  if (c.group != group_) return differs("group", c.group, group_);
  if (IsOneShot(c.id) && c.settings != settings_) {
    return differs("call", CallText(c.settings), CallText(settings_));
  }
  if (c.collective != collective_) {
    return differs("collective", ToString(c.collective), ToString(collective_));
  }
  if (c.settings != settings_)
    return differs("number of settings (which rises where a learning rate or the like changes)",
                   c.settings, settings_);
  if (c.wire != wire_) return differs("format", Name(c.wire), Name(wire_));
  if (c.elems != elems_) {
    const bool are_bytes = IsOneShot(c.id) && collective_.fold == Fold::kNone;
    return differs(are_bytes ? "number of bytes" : "number of elements", c.elems, elems_);
  }
  return absl::OkStatus();
}

void HeldRound::Hold(size_t seat, Contribution contribution) {
  held_[seat] = {std::move(contribution.payload), contribution.loss_scale};
  ++count_;
}

bool HeldRound::IsComplete(const RoundGroup& group) const {
  if (count_ < group.active()) return false;
  for (size_t i = 0; i < held_.size(); ++i) {
    if (!held_[i] && !group.seats()[i].is_lost) return false;
  }
  return true;
}

std::vector<uint32_t> HeldRound::Missing(const RoundGroup& group) const {
  std::vector<uint32_t> missing;
  for (size_t i = 0; i < held_.size(); ++i) {
    const RoundGroup::Seat& seat = group.seats()[i];
    if (!held_[i] && !seat.is_lost) missing.push_back(seat.member.node);
  }
  return missing;
}

CompleteRound HeldRound::Take(const RoundId& id, const RoundGroup& group, TimePoint now) {
  CompleteRound round{id, wire_, elems_, {}};
  round.collective = collective_;
  round.settings = settings_;
  const TimePoint since = awaited_since(now);
  round.open = now - since;
  round.missing_one = now - std::max(latest_, since);
  for (size_t i = 0; i < held_.size(); ++i) {
    const auto& [node, workers] = group.seats()[i].member;
    if (!group.seats()[i].is_lost) {
      (collective_.to.Has(node) ? round.results : round.receipts).push_back(node);
    }
    if (!held_[i] || !collective_.from.Has(node)) continue;
    if (round.payloads.empty()) round.loss_scale = held_[i]->loss_scale;
    round.payloads.push_back(std::move(held_[i]->payload));
    round.nodes.push_back(node);
    round.workers.push_back(workers);
  }
  return round;
}

}  // namespace thalweg
