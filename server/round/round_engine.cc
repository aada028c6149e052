#include "server/round/round_engine.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"

namespace thalweg {

RoundEngine::RoundEngine(const Options& options)
    : options_(options), outstanding_(options.num_nodes, 0), windows_(options.num_nodes, 0) {
  Group all{.window_chunks = options.window_chunks};
  for (uint32_t node = 0; node < options.num_nodes; ++node) {
    all.members.push_back({node, options.workers.empty() ? 1 : options.workers[node]});
  }
  Insert(all);
}

void RoundEngine::Insert(const Group& group) {
  const RoundGroup& made = groups_.try_emplace(group.id, group).first->second;
  for (const GroupMember& member : group.members) windows_[member.node] += made.window();
}

absl::Status RoundEngine::SetGroup(const Group& group) {
  THALWEG_RETURN_IF_ERROR(CheckGroup(group, options_.num_nodes));
  if (const auto known = groups_.find(group.id); known != groups_.end()) {
    const Group before = known->second.Declared();
    if (before == group) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(
        "expected ", ToString(before), ", as it has been declared before, got ", ToString(group)));
  }
  if (groups_.size() >= kMaxGroups) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the job has ", kMaxGroups, " groups already"));
  }
  Insert(group);
  RoundGroup& made = groups_.at(group.id);
  const RoundGroup& all = groups_.at(0);
  for (size_t i = 0; i < made.seats().size(); ++i) {
    if (all.seats()[made.seats()[i].member.node].is_lost) made.SetLost(i);
  }
  return absl::OkStatus();
}

void RoundEngine::AllowPart(uint32_t part) {
  RoundGroup& all = groups_.at(0);
  if (!all.AllowPart(part)) return;
  for (uint64_t& window : windows_) window += all.window_of_part();
}

absl::StatusOr<RoundEngine::Added> RoundEngine::Add(uint32_t node, Contribution contribution,
                                                    TimePoint now, uint32_t backlog,
                                                    uint32_t ahead) {
  if (contribution.epoch != options_.epoch) {
    return absl::FailedPreconditionError(absl::StrCat("contribution of epoch ", contribution.epoch,
                                                      ", but the job is in ", options_.epoch));
  }
  THALWEG_ASSIGN_OR_RETURN(const Seat at, FindSeat(node, contribution));
  THALWEG_ASSIGN_OR_RETURN(const Verdict verdict, Judge(node, at, contribution, backlog, ahead));
  if (at.group.Settle(at.index, contribution.settled)) ForgetSettled(at.group);
  if (verdict != Verdict::kHeld) return Added{verdict, std::nullopt};

  const Duration timeout =
      contribution.timeout > Duration::zero() ? contribution.timeout : options_.round_timeout;
  RoundId awaited = contribution.id;
  awaited.round -= std::min<uint64_t>(ahead, awaited.round);
  const auto open =
      open_
          .try_emplace(contribution.id, node, contribution, at.group.seats().size(), timeout, now,
                       /*counts=*/ahead == 0)
          .first;
  HeldRound& round = open->second;
  held_bytes_ += contribution.payload.SizeBytes();
  if (round.counts()) {
    ++outstanding_[node];
    ++at.group.seat(at.index).outstanding;
  }
  round.Hold(at.index, std::move(contribution));
  if (round.IsComplete(at.group)) return Added{Verdict::kCompleted, Take(open, now)};
  round.Wait(now);
  // Whoever contributes waits for this one to complete.
  if (const auto older = open_.find(awaited); older != open_.end()) older->second.Await(now);
  return Added{Verdict::kHeld, std::nullopt};
}

absl::StatusOr<RoundEngine::Seat> RoundEngine::FindSeat(uint32_t node, const Contribution& c) {
  const auto group = groups_.find(c.group);
  if (group == groups_.end()) {
    return absl::InvalidArgumentError(
        absl::StrCat(ToString(c.id), ": group ", c.group, " has not been declared"));
  }
  const std::optional<size_t> seat = group->second.Find(node);
  if (!seat) {
    return absl::InvalidArgumentError(
        absl::StrCat(ToString(c.id), ": node ", node, " is not in group ", c.group));
  }
  if (group->second.seats()[*seat].is_lost) {
    return absl::FailedPreconditionError(
        absl::StrCat(ToString(c.id), ": the job goes on without node ", node));
  }
  return Seat{group->second, *seat};
}

absl::StatusOr<RoundEngine::Verdict> RoundEngine::Judge(uint32_t node, const Seat& at,
                                                        const Contribution& c, uint32_t backlog,
                                                        uint32_t ahead) const {
  const RoundId& id = c.id;
  THALWEG_ASSIGN_OR_RETURN(const Verdict known, JudgeNumber(node, at, c, ahead));
  if (known != Verdict::kHeld) return known;
  if (const auto open = open_.find(id); open == open_.end()) {
    THALWEG_RETURN_IF_ERROR(CheckOpening(at.group, c));
  } else {
    const bool same_group = open->second.group() == c.group;
    if (same_group && open->second.Holds(at.index)) return Verdict::kDuplicate;
    THALWEG_RETURN_IF_ERROR(open->second.CheckSame(node, c));
  }
  if (const size_t bytes = c.payload.SizeBytes(); bytes > 0 && !c.collective.from.Has(node)) {
    return absl::InvalidArgumentError(absl::StrCat(ToString(id), ": node ", node, " contributes ",
                                                   bytes, " bytes to '", ToString(c.collective),
                                                   "', which wants nothing from it"));
  }
  THALWEG_RETURN_IF_ERROR(CheckWindow(node, at, backlog));
  return Verdict::kHeld;
}

absl::StatusOr<RoundEngine::Verdict> RoundEngine::JudgeNumber(uint32_t node, const Seat& at,
                                                              const Contribution& c,
                                                              uint32_t ahead) const {
  const RoundId& id = c.id;
  if (IsOneShot(id)) {
    if (id.bucket != OneShotsOf(c.group) || id.round <= c.settled) {
      return absl::InvalidArgumentError(absl::StrCat(ToString(id), ": node ", node,
                                                     " contributes to it in group ", c.group,
                                                     " and has settled ", c.settled));
    }
    if (id.round <= at.group.seats()[at.index].settled ||
        HasFinished(c.group, id.round, id.chunk)) {
      return Verdict::kStale;
    }
    return Verdict::kHeld;
  }
  const auto known = completed_.find({id.bucket, id.chunk});
  const uint64_t completed = known == completed_.end() ? 0 : known->second;
  if (id.round <= completed) return Verdict::kStale;
  const auto refused = [&](auto... why) {
    return absl::FailedPreconditionError(absl::StrCat("contribution to round ", id.round,
                                                      " of bucket ", ToString(id.bucket), " chunk ",
                                                      id.chunk, ", but ", why...));
  };
  if (id.round > completed + 1 + ahead) {
    return refused("round ", completed + 1, " is not complete");
  }
  if (id.round > completed + 1) {
    const auto before = open_.find({id.bucket, id.chunk, id.round - 1});
    if (before == open_.end() || !before->second.Holds(at.index)) {
      return refused("node ", node, " has not contributed to the round before");
    }
  }
  return Verdict::kHeld;
}

absl::Status RoundEngine::CheckOpening(const RoundGroup& group, const Contribution& c) const {
  THALWEG_RETURN_IF_ERROR(Validate(c.collective, c.wire));
  for (const Place& place : {c.collective.from, c.collective.to}) {
    if (place.kind != Place::Kind::kOne) continue;
    const std::optional<size_t> seat = group.Find(place.node);
    if (!seat) {
      return absl::InvalidArgumentError(absl::StrCat(ToString(c.id), ": '", ToString(c.collective),
                                                     "' in group ", c.group,
                                                     ", which has no such node"));
    }
    if (group.seats()[*seat].is_lost) {
      return absl::FailedPreconditionError(
          absl::StrCat(ToString(c.id), ": '", ToString(c.collective),
                       "', but the job goes on without node ", place.node));
    }
  }
  if (IsOneShot(c.id) && finished_runs_ >= kMaxUnsettled) {
    return absl::ResourceExhaustedError(absl::StrCat(
        ToString(c.id), ": nodes have not settled ", finished_runs_,
        " earlier ones, of which group ", c.group, " has settled all up to ", group.settled()));
  }
  return absl::OkStatus();
}

absl::Status RoundEngine::CheckWindow(uint32_t node, const Seat& at, uint32_t backlog) const {
  // The parts share one limit, and the groups share the backlog, which is not counted by either.
  const uint64_t window = at.group.window();
  const bool is_full = at.group.seats()[at.index].outstanding >= window;
  if (!is_full && uint64_t{outstanding_[node]} + backlog < windows_[node]) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "more than the window of ", is_full ? window : windows_[node], " chunks without a result"));
}

CompleteRound RoundEngine::Take(Open::iterator open, TimePoint now) {
  const RoundId id = open->first;
  const RoundGroup& group = groups_.at(open->second.group());
  Release(open->second);
  CompleteRound round = open->second.Take(id, group, now);
  if (!IsOneShot(id)) {
    completed_[{id.bucket, id.chunk}] = id.round;
  } else if (id.round > group.settled()) {
    ChunkSet& chunks = finished_[{open->second.group(), id.round}];
    finished_runs_ -= chunks.runs();
    chunks.Add(id.chunk);
    finished_runs_ += chunks.runs();
  }
  open_.erase(open);
  return round;
}

RoundEngine::Open::iterator RoundEngine::Drop(Open::iterator open) {
  Release(open->second);
  return open_.erase(open);
}

void RoundEngine::Release(const HeldRound& round) {
  RoundGroup& group = groups_.at(round.group());
  for (size_t i = 0; i < group.seats().size(); ++i) {
    if (!round.Holds(i)) continue;
    RoundGroup::Seat& seat = group.seat(i);
    held_bytes_ -= round.BytesOf(i);
    if (!round.counts()) continue;
    --outstanding_[seat.member.node];
    --seat.outstanding;
  }
}

void RoundEngine::ForgetSettled(const RoundGroup& group) {
  const auto begin = finished_.lower_bound({group.id(), 0});
  const auto end = finished_.upper_bound({group.id(), group.settled()});
  for (auto each = begin; each != end; ++each) finished_runs_ -= each->second.runs();
  finished_.erase(begin, end);
}

bool RoundEngine::HasFinished(uint32_t group, uint64_t sequence, uint32_t chunk) const {
  const auto found = finished_.find({group, sequence});
  return found != finished_.end() && found->second.Contains(chunk);
}

RoundEngine::Removed RoundEngine::Remove(uint32_t node, TimePoint now) {
  Removed removed;
  for (auto& [id, group] : groups_) {
    const std::optional<size_t> seat = group.Find(node);
    if (seat && group.SetLost(*seat)) ForgetSettled(group);
  }
  for (auto open = open_.begin(); open != open_.end();) {
    const HeldRound& round = open->second;
    const RoundGroup& group = groups_.at(round.group());
    const std::optional<size_t> seat = group.Find(node);
    if (seat && round.Needs(node) && !round.Holds(*seat)) {
      removed.impossible.push_back(Describe(*open));
      open = Drop(open);
    } else if (round.IsComplete(group)) {
      removed.completed.push_back(Take(open++, now));
    } else {
      ++open;
    }
  }
  return removed;
}

RoundEngine::OpenRound RoundEngine::Describe(const Open::value_type& open) const {
  const auto& [id, round] = open;
  return {id, round.opened(), round.Missing(groups_.at(round.group())), round.timeout()};
}

std::vector<RoundEngine::OpenRound> RoundEngine::Expired(TimePoint now) const {
  std::vector<OpenRound> expired;
  for (const auto& open : open_) {
    if (now - open.second.awaited_since(now) > open.second.timeout())
      expired.push_back(Describe(open));
  }
  return expired;
}

std::optional<RoundEngine::OpenRound> RoundEngine::OldestWaitingFor(uint32_t node) const {
  const Open::value_type* oldest = nullptr;
  for (const auto& open : open_) {
    const RoundGroup& group = groups_.at(open.second.group());
    const std::optional<size_t> seat = group.Find(node);
    if (!seat || group.seats()[*seat].is_lost || open.second.Holds(*seat)) continue;
    if (oldest == nullptr || open.second.opened() < oldest->second.opened()) oldest = &open;
  }
  if (oldest == nullptr) return std::nullopt;
  return Describe(*oldest);
}

std::optional<RoundEngine::OpenRound> RoundEngine::Oldest() const {
  const auto oldest = std::min_element(
      open_.begin(), open_.end(),
      [](const auto& a, const auto& b) { return a.second.opened() < b.second.opened(); });
  if (oldest == open_.end()) return std::nullopt;
  return Describe(*oldest);
}

size_t RoundEngine::DropOlderLayouts(BucketId id) {
  const BucketId begin{id.index, 0, 0}, end{id.index, id.generation, 0};
  completed_.erase(completed_.lower_bound({begin, 0}), completed_.lower_bound({end, 0}));
  size_t dropped = 0;
  auto open = open_.lower_bound(RoundId{begin, 0, 0});
  while (open != open_.end() && open->first.bucket < end) {
    open = Drop(open);
    ++dropped;
  }
  return dropped;
}

uint64_t RoundEngine::max_held() const {
  uint64_t held = 0;
  for (const uint64_t window : windows_) held += window;
  return held;
}

}  // namespace thalweg
