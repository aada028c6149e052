#include "server/round/round_engine.h"

#include "absl/strings/str_cat.h"

namespace thalweg {

RoundEngine::RoundEngine(const Options& options)
    : options_(options), outstanding_(options.num_nodes, 0) {}

absl::StatusOr<RoundEngine::Added> RoundEngine::Add(uint32_t node, Contribution contribution,
                                                    TimePoint now, uint32_t backlog) {
  const RoundId id = contribution.id;
  if (contribution.epoch != options_.epoch) {
    return absl::FailedPreconditionError(absl::StrCat("contribution of epoch ", contribution.epoch,
                                                      ", but the job is in ", options_.epoch));
  }
  const ChunkKey key(id.bucket, id.chunk);
  const auto known = chunks_.find(key);
  const uint64_t completed = known == chunks_.end() ? 0 : known->second.completed;
  if (id.round <= completed) return Added{Verdict::kStale, std::nullopt};
  if (id.round != completed + 1) {
    return absl::FailedPreconditionError(
        absl::StrCat("contribution to round ", id.round, " of bucket ", ToString(id.bucket),
                     " chunk ", id.chunk, ", but round ", completed + 1, " is not complete"));
  }
  if (known != chunks_.end() && known->second.count > 0 && known->second.held[node]) {
    return Added{Verdict::kDuplicate, std::nullopt};
  }
  // The parts share one limit, because the backlog is not counted by part.
  if (const size_t window = parts_.count() * options_.window_chunks;
      outstanding_[node] + backlog >= window) {
    return absl::ResourceExhaustedError(
        absl::StrCat("more than the window of ", window, " chunks without a result"));
  }

  ChunkState& state = known == chunks_.end() ? chunks_[key] : known->second;
  if (state.count == 0) {
    state.opened = now;
    state.latest = now;
    state.held.resize(options_.num_nodes);
    ++open_rounds_;
  }
  held_bytes_ += contribution.payload.SizeBytes();
  ++outstanding_[node];
  ++state.count;
  state.held[node] = std::move(contribution);
  if (state.count < options_.num_nodes) {
    state.latest = now;
    return Added{Verdict::kHeld, std::nullopt};
  }
  return Added{Verdict::kCompleted, Take(key, state, now)};
}

RoundEngine::CompleteRound RoundEngine::Take(const ChunkKey& key, ChunkState& state,
                                             TimePoint now) {
  CompleteRound round;
  round.open = now - state.opened;
  round.missing_one = now - state.latest;
  round.id = {key.first, key.second, state.completed + 1};
  round.wire = state.held[0]->wire;
  round.elems = state.held[0]->elems;
  round.loss_scale = state.held[0]->loss_scale;
  for (uint32_t node = 0; node < options_.num_nodes; ++node) {
    held_bytes_ -= state.held[node]->payload.SizeBytes();
    --outstanding_[node];
    round.payloads.push_back(std::move(state.held[node]->payload));
  }
  state.held.clear();
  state.count = 0;
  ++state.completed;
  --open_rounds_;
  return round;
}

RoundEngine::OpenRound RoundEngine::Describe(const ChunkKey& key, const ChunkState& state) const {
  OpenRound open{{key.first, key.second, state.completed + 1}, state.opened, {}};
  for (uint32_t node = 0; node < options_.num_nodes; ++node) {
    if (!state.held[node]) open.missing.push_back(node);
  }
  return open;
}

std::vector<RoundEngine::OpenRound> RoundEngine::Expired(TimePoint now) const {
  std::vector<OpenRound> expired;
  if (open_rounds_ == 0) return expired;
  for (const auto& [key, state] : chunks_) {
    if (state.count > 0 && now - state.opened > options_.round_timeout) {
      expired.push_back(Describe(key, state));
    }
  }
  return expired;
}

std::optional<RoundEngine::OpenRound> RoundEngine::OldestWaitingFor(uint32_t node) const {
  const ChunkState* oldest = nullptr;
  ChunkKey oldest_key;
  for (const auto& [key, state] : chunks_) {
    if (state.count == 0 || state.held[node]) continue;
    if (oldest == nullptr || state.opened < oldest->opened) {
      oldest = &state;
      oldest_key = key;
    }
  }
  if (oldest == nullptr) return std::nullopt;
  return Describe(oldest_key, *oldest);
}

std::optional<RoundEngine::OpenRound> RoundEngine::Oldest() const {
  if (open_rounds_ == 0) return std::nullopt;
  const std::pair<const ChunkKey, ChunkState>* oldest = nullptr;
  for (const auto& chunk : chunks_) {
    if (chunk.second.count == 0) continue;
    if (oldest == nullptr || chunk.second.opened < oldest->second.opened) oldest = &chunk;
  }
  return Describe(oldest->first, oldest->second);
}

size_t RoundEngine::DropOlderLayouts(BucketId id) {
  size_t open = 0;
  auto it = chunks_.lower_bound(ChunkKey(BucketId{id.index, 0, 0}, 0));
  while (it != chunks_.end() && it->first.first < BucketId{id.index, id.generation, 0}) {
    ChunkState& state = it->second;
    if (state.count > 0) {
      ++open;
      --open_rounds_;
      for (uint32_t node = 0; node < options_.num_nodes; ++node) {
        if (!state.held[node]) continue;
        held_bytes_ -= state.held[node]->payload.SizeBytes();
        --outstanding_[node];
      }
    }
    it = chunks_.erase(it);
  }
  return open;
}

}  // namespace thalweg
