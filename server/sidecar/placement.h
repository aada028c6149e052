// Which shard sums which chunk.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "core/base/layout.h"
#include "core/base/wire_format.h"

namespace thalweg {

// Gives every chunk to the shard that has the fewest bytes for its weight so far, the first such
// shard on a tie: with equal weights chunks go round all shards, and small buckets spread over
// them. Deterministic: nodes that place the same buckets in the same order agree.
// Thread-compatible.
class Placement {
 public:
  explicit Placement(std::vector<uint32_t> weights);  // by shard, each ≥ 1

  // The shard of each chunk of bucket `index`, which cross the network in format `wire`; forgets
  // the bucket's earlier layout.
  std::vector<uint32_t> Place(uint32_t index, const ChunkPlan& plan, WireFormat wire);

  // Equal for equal placements.
  static uint64_t Fingerprint(std::span<const uint32_t> shard_of_chunk);

 private:
  std::vector<uint32_t> weights_;
  std::vector<uint64_t> loads_;                          // bytes, by shard
  std::map<uint32_t, std::vector<uint64_t>> of_bucket_;  // the part of loads_ that a bucket makes
};

}  // namespace thalweg
