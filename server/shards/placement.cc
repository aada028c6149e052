#include "server/shards/placement.h"

#include <utility>

#include "core/base/hash.h"

namespace thalweg {

Placement::Placement(std::vector<uint32_t> weights)
    : weights_(std::move(weights)), loads_(weights_.size()) {}

std::vector<uint32_t> Placement::Place(uint32_t index, const ChunkPlan& plan, WireFormat wire) {
  std::vector<uint64_t>& mine = of_bucket_[index];
  mine.resize(weights_.size());
  for (size_t k = 0; k < mine.size(); ++k) loads_[k] -= std::exchange(mine[k], 0);

  std::vector<uint32_t> shards;
  shards.reserve(plan.Count());
  for (uint32_t chunk = 0; chunk < plan.Count(); ++chunk) {
    const uint64_t bytes = MaxEncodedBytes(wire, plan.Elems(chunk));
    uint32_t best = 0;
    for (uint32_t k = 1; k < weights_.size(); ++k) {
      // This compares (load + bytes) / weight without dividing, and a weight of 0 never wins.
      if ((loads_[k] + bytes) * weights_[best] < (loads_[best] + bytes) * weights_[k]) best = k;
    }
    loads_[best] += bytes;
    mine[best] += bytes;
    shards.push_back(best);
  }
  return shards;
}

uint64_t Placement::Fingerprint(std::span<const uint32_t> shard_of_chunk) {
  Fnv1a hash;
  for (uint32_t shard : shard_of_chunk) hash.Add(shard);
  return hash.hash();
}

}  // namespace thalweg
