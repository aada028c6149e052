#include "server/round/chunk_states.h"

#include <utility>

namespace thalweg {

Weights& ChunkState::WeightsToChange() {
  if (is_wanted_) copy_ = weights;
  is_wanted_ = false;
  return weights;
}

void ChunkState::WantWeights() {
  MutexLock lock(mutex);
  is_wanted_ = true;
}

Weights ChunkState::FetchWanted() {
  MutexLock lock(mutex);
  if (std::exchange(is_wanted_, false)) return weights;
  return std::exchange(copy_, std::nullopt).value_or(Weights());
}

std::shared_ptr<ChunkState> ChunkStates::Get(BucketId bucket, uint32_t chunk, uint64_t elems,
                                             std::vector<ElemRange> padding,
                                             uint64_t bytes_per_elem) {
  Entry& entry = entries_[{bucket, chunk}];
  if (entry.state == nullptr) {
    entry = {std::make_shared<ChunkState>(elems, std::move(padding)), elems * bytes_per_elem};
    bytes_ += entry.bytes;
  }
  return entry.state;
}

std::shared_ptr<ChunkState> ChunkStates::Find(BucketId bucket, uint32_t chunk) const {
  const auto found = entries_.find({bucket, chunk});
  return found == entries_.end() ? nullptr : found->second.state;
}

std::vector<ChunkStates::Chunk> ChunkStates::All() const {
  std::vector<Chunk> all;
  for (const auto& [key, entry] : entries_) all.push_back({key.first, key.second, entry.state});
  return all;
}

void ChunkStates::DropOlderLayouts(BucketId id) {
  auto it = entries_.lower_bound({BucketId{id.index, 0, 0}, 0});
  while (it != entries_.end() && it->first.first < BucketId{id.index, id.generation, 0}) {
    bytes_ -= it->second.bytes;
    it = entries_.erase(it);
  }
}

}  // namespace thalweg
