// Placement decides which shard sums which chunk.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "core/base/layout.h"
#include "core/base/wire_format.h"

namespace thalweg {

// It gives every chunk to the shard with the fewest bytes relative to its weight so far, the first
// such shard on a tie; a shard of weight 0 gets none. With equal weights, chunks go to all shards
// in turn, and small buckets spread over them. It is deterministic: nodes that place the same
// buckets in the same order agree. Thread-compatible.
class Placement {
 public:
  explicit Placement(std::vector<uint32_t> weights);  // by shard; one is not 0

  // Returns the shard of each chunk of bucket `index`, whose chunks cross the network in format
  // `wire`; drops the bucket's earlier layout.
  std::vector<uint32_t> Place(uint32_t index, const ChunkPlan& plan, WireFormat wire);

  // Returns a value that is equal for equal placements.
  static uint64_t Fingerprint(std::span<const uint32_t> shard_of_chunk);

 private:
  std::vector<uint32_t> weights_;
  std::vector<uint64_t> loads_;                          // bytes, by shard
  std::map<uint32_t, std::vector<uint64_t>> of_bucket_;  // each bucket's part of loads_
};

}  // namespace thalweg
