// Part is one vector that a bucket's round sends through the shards: the bucket itself (part 0), or
// what compression sends in its place. Every part has its own layout, chunks and count of rounds.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "core/base/clock.h"
#include "core/base/layout.h"
#include "core/base/wire_format.h"
#include "core/exchange/rounds.h"

namespace thalweg {

// The mutex of the NodeBucket guards a Part, except its plan and announcement, which do not change.
struct Part {
  Part(BucketId id, BucketLayout layout, WireFormat wire, uint64_t chunk_bytes,
       uint32_t num_shards);

  void BeginRound(UpdateRound what = UpdateRound::kPush);
  // Claims chunk `result.id.chunk` of the round for decoding. Returns InvalidArgument when the
  // result does not belong to the round in flight, FailedPrecondition when it is a duplicate.
  absl::Status Claim(const RoundResult& result);
  // Records that the claimed chunk has been decoded. Returns true when it was the round's last.
  bool FinishChunk(const RoundResult& result);

  uint64_t Elems() const { return plan.total_elems; }
  // Sets the bucket's update. Before it is announced.
  void SetUpdate(const UpdateRule& update, uint64_t chunk_bytes, uint32_t num_shards);
  // Returns whether the round's results are squares: see UpdateRound.
  bool gives_squares() const {
    return bucket.update && bucket.update->commits && kind != UpdateRound::kPull;
  }
  // Returns how many of them there are for each granule.
  uint32_t NumSquares() const { return kind == UpdateRound::kMeasure ? 2 : 1; }
  // Say what a result of the round has for a chunk.
  bool ResultsComeIn(WireFormat format) const;
  uint64_t ResultElems(uint32_t chunk) const;

  BucketAnnouncement bucket;
  ChunkPlan plan;
  // Set when announced to the shards: by the run thread, or at once where these keep the weights.
  std::vector<uint32_t> shard_of_chunk;

  // The following members are the round's.
  uint64_t round = 0;  // in flight, or the last one
  bool in_flight = false;
  UpdateRound kind = UpdateRound::kPush;
  std::vector<bool> claimed;    // by chunk
  std::vector<TimePoint> sent;  // by chunk, when it was sent
  uint32_t finished_chunks = 0;
  uint32_t workers = 0;  // number of workers in the mean
  uint64_t nonfinite_elems = 0;
};

}  // namespace thalweg
