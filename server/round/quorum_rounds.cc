#include "server/round/quorum_rounds.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"

namespace thalweg {
namespace {

constexpr Duration kForever = std::chrono::hours(1 << 16);
constexpr int kForgets = 4;  // a node's lateness is a mean of about so many updates

}  // namespace

absl::StatusOr<RoundEngine::Added> QuorumRounds::Add(const Giver& giver, Contribution contribution,
                                                     std::shared_ptr<const UpdateRule> rule,
                                                     const UpdateStep& settings, TimePoint now) {
  const uint32_t node = giver.node;
  const RoundId id = contribution.id;
  if (!lone_.Has(node, id)) {
    THALWEG_RETURN_IF_ERROR(CheckAdd(giver, id, *rule, settings.waits_for_all));
  }
  THALWEG_ASSIGN_OR_RETURN(RoundEngine::Added lone,
                           lone_.Add(node, giver.workers, std::move(contribution)));
  if (!lone.completed) return lone;  // it has come before
  behind_.erase(node);
  const Key key{id.bucket, id.chunk};
  Chunk& chunk = chunks_[key];
  chunk.rule = std::move(rule);
  Seat& seat = chunk.seats[node];
  Measure(chunk, seat, now);
  const bool is_late = seat.version < chunk.version;
  Share share{*std::move(lone.completed), now, settings.gives_nothing};
  RoundEngine::Added added{RoundEngine::Verdict::kHeld, {}};
  added.late.updates = chunk.version - seat.version;
  seat.version = chunk.version;
  if (is_late && chunk.rule->drops_late) share.is_empty = true;
  const bool is_dropped = !settings.waits_for_all && is_late && share.is_empty;
  if (!is_dropped) held_bytes_ += share.bytes();
  if (settings.waits_for_all) {
    ++held_[node];
    ++ending_[node];
    chunk.ending.emplace(node, std::move(share));
  } else if (is_late) {
    added.late.answer = chunk.version;
    if (!is_dropped) chunk.kept.emplace(node, std::move(share));
  } else {
    ++held_[node];
    chunk.waiting.emplace(node, std::move(share));
  }
  added.completed = Close(key, chunk, now);
  if (added.completed) added.verdict = RoundEngine::Verdict::kCompleted;
  return added;
}

absl::Status QuorumRounds::CheckAdd(const Giver& giver, const RoundId& id, const UpdateRule& rule,
                                    bool waits_for_all) const {
  if (held_[giver.node] >= giver.window) {
    return absl::ResourceExhaustedError(absl::StrCat(
        ToString(id), ": node ", giver.node, " exceeds its window of ", giver.window, " chunks"));
  }
  if (!waits_for_all && NumHere() < rule.quorum) {
    return absl::AbortedError(absl::StrCat(ToString(id), ": an update needs a quorum of ",
                                           rule.quorum, " nodes, and ", NumHere(), " are here"));
  }
  const auto chunk = chunks_.find({id.bucket, id.chunk});
  if (chunk == chunks_.end()) return absl::OkStatus();
  const auto& unanswered = waits_for_all ? chunk->second.ending : chunk->second.waiting;
  if (!unanswered.contains(giver.node)) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(ToString(id), ": node ", giver.node, " waits for the answer to an earlier one"));
}

void QuorumRounds::Measure(const Chunk& chunk, Seat& seat, TimePoint now) {
  Duration lateness{};
  if (seat.version < chunk.version) {
    const auto missed = static_cast<int64_t>(chunk.version - seat.version - 1);
    lateness = now - chunk.last_quorum + chunk.interval * missed;
  } else if (chunk.quorum) {
    lateness = now - *chunk.quorum;
  }
  // Contributions are timed before they wait for their lock.
  lateness = std::max(lateness, Duration::zero());
  seat.lateness =
      seat.lateness ? *seat.lateness + (lateness - *seat.lateness) / kForgets : lateness;
}

std::vector<uint32_t> QuorumRounds::Missing(const Chunk& chunk) const {
  std::vector<uint32_t> missing;
  for (uint32_t node = 0; node < num_nodes_; ++node) {
    if (IsHere(node) && !chunk.waiting.contains(node) && ending_[node] == 0) {
      missing.push_back(node);
    }
  }
  return missing;
}

std::vector<uint32_t> QuorumRounds::NotEnding(const Chunk& chunk) const {
  std::vector<uint32_t> missing;
  for (uint32_t node = 0; node < num_nodes_; ++node) {
    if (IsHere(node) && !chunk.ending.contains(node)) missing.push_back(node);
  }
  return missing;
}

Duration QuorumRounds::Grace(const Chunk& chunk, const std::vector<uint32_t>& missing) const {
  const bool is_measured = chunk.rule->grace_ms == kMeasuredGrace;
  // Nothing has been measured before the first update.
  if (is_measured && !chunk.updated) return kForever;
  Duration grace{};
  for (const uint32_t node : missing) {
    if (behind_.contains(node)) continue;
    if (!is_measured) return std::chrono::milliseconds(chunk.rule->grace_ms);
    const auto seat = chunk.seats.find(node);
    if (seat == chunk.seats.end() || !seat->second.lateness) continue;
    const Duration wait = kGraceFactor * *seat->second.lateness;
    if (wait <= (*chunk.quorum - *chunk.updated) / kGracePart) grace = std::max(grace, wait);
  }
  return grace;
}

std::optional<CompleteRound> QuorumRounds::Close(const Key& key, Chunk& chunk, TimePoint now) {
  if (!chunk.waiting.empty()) {
    const std::vector<uint32_t> missing = Missing(chunk);
    if (!missing.empty() && chunk.waiting.size() < chunk.rule->quorum) return std::nullopt;
    if (!chunk.quorum) chunk.quorum = now;
    if (!missing.empty() && now < *chunk.quorum + Grace(chunk, missing)) return std::nullopt;
    behind_.insert(missing.begin(), missing.end());
    return Take(key, chunk, std::exchange(chunk.waiting, {}), now);
  }
  if (chunk.ending.empty() || !NotEnding(chunk).empty()) return std::nullopt;
  for (const auto& [node, share] : chunk.ending) --ending_[node];
  return Take(key, chunk, std::exchange(chunk.ending, {}), now);
}

CompleteRound QuorumRounds::Take(const Key& key, Chunk& chunk, std::map<uint32_t, Share> shares,
                                 TimePoint now) {
  const CompleteRound& first = shares.begin()->second.round;
  CompleteRound update{{key.first, key.second, chunk.version}, first.wire, first.elems, {}};
  TimePoint opened = now;
  for (const auto& [node, share] : shares) {
    opened = std::min(opened, share.came);
    // Late ones may name old settings.
    if (update.settings == 0 && !share.is_empty) update.settings = share.round.settings;
    update.answers.emplace_back(node, share.round.id.round);
    --held_[node];
  }
  update.open = now - opened;
  if (chunk.quorum) update.missing_one = now - *chunk.quorum;
  std::multimap<uint32_t, Share> all = std::exchange(chunk.kept, {});
  all.insert(std::make_move_iterator(shares.begin()), std::make_move_iterator(shares.end()));
  for (auto& [node, share] : all) {
    held_bytes_ -= share.bytes();
    if (share.is_empty) continue;
    if (update.settings == 0) update.settings = share.round.settings;
    update.payloads.push_back(std::move(share.round.payloads.front()));
    update.nodes.push_back(node);
    update.workers.push_back(share.round.workers.front());
    update.rounds.push_back(share.round.id.round);
  }
  chunk.last_quorum = std::exchange(chunk.quorum, std::nullopt).value_or(now);
  if (update.payloads.empty()) return update;  // all get the weights that are there
  update.id.round = ++chunk.version;
  for (const auto& [node, number] : update.answers) chunk.seats[node].version = chunk.version;
  if (chunk.updated) chunk.interval = now - *chunk.updated;
  chunk.updated = now;
  return update;
}

std::vector<CompleteRound> QuorumRounds::Ripe(TimePoint now) {
  std::vector<CompleteRound> ripe;
  for (auto& [key, chunk] : chunks_) {
    if (chunk.waiting.empty() && chunk.ending.empty()) continue;
    if (auto update = Close(key, chunk, now)) ripe.push_back(*std::move(update));
  }
  return ripe;
}

RoundEngine::Removed QuorumRounds::Remove(uint32_t node, TimePoint now) {
  gone_.insert(node);
  RoundEngine::Removed removed;
  for (auto& [key, chunk] : chunks_) {
    if (!chunk.waiting.empty() && NumHere() < chunk.rule->quorum) {
      removed.impossible.push_back(Describe(key, chunk));
    } else if (auto update = Close(key, chunk, now)) {
      removed.completed.push_back(*std::move(update));
    }
  }
  return removed;
}

std::vector<RoundEngine::OpenRound> QuorumRounds::Expired(TimePoint now, Duration timeout) const {
  std::vector<RoundEngine::OpenRound> expired;
  for (const auto& [key, chunk] : chunks_) {
    if (chunk.waiting.empty() && chunk.ending.empty()) continue;
    RoundEngine::OpenRound open = Describe(key, chunk);
    open.timeout = timeout;
    if (now - open.opened > timeout) expired.push_back(std::move(open));
  }
  return expired;
}

std::optional<RoundEngine::OpenRound> QuorumRounds::Oldest() const {
  std::optional<RoundEngine::OpenRound> oldest;
  for (const auto& [key, chunk] : chunks_) {
    if (chunk.waiting.empty() && chunk.ending.empty()) continue;
    RoundEngine::OpenRound open = Describe(key, chunk);
    if (!oldest || open.opened < oldest->opened) oldest = std::move(open);
  }
  return oldest;
}

RoundEngine::OpenRound QuorumRounds::Describe(const Key& key, const Chunk& chunk) const {
  RoundEngine::OpenRound open{{key.first, key.second, chunk.version + 1},
                              TimePoint::max(),
                              chunk.waiting.empty() ? NotEnding(chunk) : Missing(chunk)};
  for (const auto* shares : {&chunk.waiting, &chunk.ending}) {
    for (const auto& [node, share] : *shares) open.opened = std::min(open.opened, share.came);
  }
  return open;
}

void QuorumRounds::DropOlderLayouts(BucketId id) {
  lone_.DropOlderLayouts(id);
  const auto end = chunks_.lower_bound({BucketId{id.index, id.generation, 0}, 0});
  auto chunk = chunks_.lower_bound({BucketId{id.index, 0, 0}, 0});
  while (chunk != end) {
    for (const auto& [node, share] : chunk->second.kept) held_bytes_ -= share.bytes();
    for (const auto& [node, share] : chunk->second.waiting) {
      held_bytes_ -= share.bytes();
      --held_[node];
    }
    for (const auto& [node, share] : chunk->second.ending) {
      held_bytes_ -= share.bytes();
      --held_[node];
      --ending_[node];
    }
    chunk = chunks_.erase(chunk);
  }
}

}  // namespace thalweg
