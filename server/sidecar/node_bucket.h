// One bucket on one node: the workers' arenas, the node's encoded share, the result, and how far
// the current round has come.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/clock.h"
#include "core/base/exchange.h"
#include "core/base/layout.h"
#include "core/base/payload.h"
#include "core/ipc/bucket_arena.h"

namespace thalweg {

// The members above "Round" never change after Create and AddInput; the others are guarded by the
// mutex of the NodeJob that owns the bucket. While a round is in flight the bytes of the arenas
// belong to the round: the job's fold threads read the inputs and write disjoint chunks of
// `encoded`, the threads that bring results write disjoint chunks of `result`.
class NodeBucket : public std::enable_shared_from_this<NodeBucket> {
 public:
  // Allocates the result arena and, for several workers, the buffer for their encoded mean.
  static absl::StatusOr<std::shared_ptr<NodeBucket>> Create(BucketId id, const BucketLayout& layout,
                                                            const std::string& owner, DType codec,
                                                            uint64_t chunk_bytes,
                                                            uint32_t num_shards,
                                                            uint32_t local_size);

  // The arena in which worker `local_rank` will put its share, in type `share`.
  absl::Status AddInput(uint32_t local_rank, UniqueFd fd);

  // Begins round `round` for this worker. True when that makes it ready: all workers have submitted
  // it. InvalidArgument: out of order, or before its arena came.
  absl::StatusOr<bool> Submit(uint32_t local_rank, uint64_t submitted_round, TimePoint now);
  // Local ranks that have not submitted, while others have; else empty.
  std::vector<uint32_t> MissingWorkers() const;

  // Claims chunk `result.id.chunk` of the round for decoding. InvalidArgument when the result does
  // not belong to the round in flight, FailedPrecondition when it came before.
  absl::Status Claim(const RoundResult& received);
  // The claimed chunk lies in `result`. True when that was the round's last: the bucket is idle
  // again.
  bool FinishChunk(const RoundResult& received, TimePoint now);
  // Also for an empty bucket, which has no chunk to finish.
  void FinishRound(TimePoint now);

  // The workers' shares of a chunk, by local rank.
  std::vector<const void*> Shares(uint32_t chunk) const;
  // The node's encoded share of a chunk, which the payload refers to and keeps. For a node's only
  // worker it is what lies in the worker's arena.
  Payload EncodedShare(uint32_t chunk);

  bool in_flight() const { return ready; }

  BucketId id;
  BucketLayout layout;
  std::string owner;  // who announced it first, "rank 3"
  DType share = DType::kFloat32;
  DType wire = DType::kFloat32;
  ChunkPlan plan;
  std::vector<uint32_t> shard_of_chunk;  // once registered with the shards, by the run thread
  std::vector<std::optional<BucketArena>> inputs;  // by local rank
  std::optional<BucketArena> result;
  std::unique_ptr<std::byte[]> encoded;  // null for a node's only worker

  // Round.
  uint64_t round = 0;           // in flight, or the last one
  std::vector<bool> submitted;  // by local rank, to round + 1 or the round in flight
  uint32_t num_submitted = 0;
  TimePoint first_submit;
  bool ready = false;  // all have submitted, results are outstanding
  TimePoint ready_since;
  std::vector<bool> claimed;  // by chunk
  uint32_t finished_chunks = 0;
  uint32_t workers = 0;  // that the result is the mean over
  uint64_t nonfinite_elems = 0;
  Duration reduce_time{};
  Duration wait_time{};
  std::optional<TimePoint> first_sent;
  Duration wire_time{};
};

}  // namespace thalweg
