// Placement decides which shard sums which chunk.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
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

  // A bucket, placed: the shard of each chunk, and the bytes that each shard has of it.
  struct Placed {
    std::vector<uint32_t> shards;
    std::vector<uint64_t> loads;

    bool operator==(const Placed&) const = default;
  };
  // Places a bucket, whose chunks cross the network in format `wire`, and drops what has been
  // placed with its index before.
  Placed Place(BucketId id, const ChunkPlan& plan, WireFormat wire);
  // Returns where the bucket has been placed; null: it has not, or another layout has since.
  const Placed* Find(BucketId id) const;
  // Takes what another object with these weights has placed. InvalidArgument: it cannot have.
  absl::Status Restore(BucketId id, Placed placed);

  // Returns a value that is equal for equal placements.
  static uint64_t Fingerprint(std::span<const uint32_t> shard_of_chunk);

 private:
  std::vector<uint32_t> weights_;
  std::vector<uint64_t> loads_;                             // bytes, by shard
  std::map<uint32_t, std::pair<BucketId, Placed>> placed_;  // by index; part of loads_
};

}  // namespace thalweg
