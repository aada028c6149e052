// One vector of a bucket's round on its way through the shards: the bucket itself (part 0), or what
// compression sends in its stead. Every part has its own layout, chunks and count of rounds.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "core/base/clock.h"
#include "core/base/exchange.h"
#include "core/base/layout.h"
#include "core/base/wire_format.h"

namespace thalweg {

// Guarded like the NodeBucket that it belongs to.
struct Part {
  Part(BucketId id, BucketLayout layout, WireFormat wire, uint64_t chunk_bytes,
       uint32_t num_shards);

  void BeginRound();
  // Claims chunk `result.id.chunk` of the round for decoding. InvalidArgument when the result does
  // not belong to the round in flight, FailedPrecondition when it came before.
  absl::Status Claim(const RoundResult& result);
  // The claimed chunk has been decoded. True when that was the round's last.
  bool FinishChunk(const RoundResult& result);

  uint64_t Elems() const { return plan.total_elems; }

  BucketAnnouncement bucket;
  ChunkPlan plan;
  std::vector<uint32_t> shard_of_chunk;  // once announced to the shards, by the run thread

  // Round.
  uint64_t round = 0;  // in flight, or the last one
  bool in_flight = false;
  std::vector<bool> claimed;    // by chunk
  std::vector<TimePoint> sent;  // by chunk, if it was
  uint32_t finished_chunks = 0;
  uint32_t workers = 0;  // that the result is the mean over
  uint64_t nonfinite_elems = 0;
};

}  // namespace thalweg
