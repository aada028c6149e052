#include "server/round/chunk_set.h"

#include <iterator>

namespace thalweg {

void ChunkSet::Add(uint32_t chunk) {
  if (Contains(chunk)) return;
  auto after = runs_.upper_bound(chunk);
  auto run = after == runs_.begin() ? runs_.end() : std::prev(after);
  if (run != runs_.end() && run->second + 1 == chunk) {
    run->second = chunk;
  } else {
    run = runs_.emplace_hint(after, chunk, chunk);
  }
  if (after == runs_.end() || after->first - 1 != chunk) return;
  run->second = after->second;
  runs_.erase(after);
}

bool ChunkSet::Contains(uint32_t chunk) const {
  const auto after = runs_.upper_bound(chunk);
  return after != runs_.begin() && std::prev(after)->second >= chunk;
}

}  // namespace thalweg
