// One bucket on one node: the workers' arenas, the node's share, the result, and how far the
// current round has come.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/clock.h"
#include "core/base/codec_spec.h"
#include "core/base/exchange.h"
#include "core/base/layout.h"
#include "core/base/payload.h"
#include "core/ipc/bucket_arena.h"
#include "server/sidecar/part.h"
#include "server/sidecar/power_sgd.h"

namespace thalweg {

// What all buckets of a job have in common on this node.
struct BucketTerms {
  CodecSpec codec;
  uint64_t chunk_bytes = 0;
  uint32_t num_shards = 1;
  uint32_t num_nodes = 1;
  uint32_t local_size = 1;
};

// The members above "Round" never change after Create and AddInput; the others are guarded by the
// mutex of the NodeJob that owns the bucket. While a round is in flight the bytes of the arenas
// belong to the round: the job's fold threads read the inputs and write disjoint chunks of
// `encoded`, the threads that bring results write disjoint chunks of `result`.
class NodeBucket : public std::enable_shared_from_this<NodeBucket> {
 public:
  // Allocates the result arena and, unless the worker's arena is what is sent, the buffer for the
  // node's encoded mean. `matrices` is the job's.
  static absl::StatusOr<std::shared_ptr<NodeBucket>> Create(BucketId id, const BucketLayout& layout,
                                                            const std::string& owner,
                                                            const BucketTerms& terms,
                                                            MatrixStates& matrices);

  // The arena in which worker `local_rank` will put its share, in type `share`.
  absl::Status AddInput(uint32_t local_rank, UniqueFd fd);

  // Begins round `round` for this worker. True when that makes it ready: all workers have submitted
  // it. InvalidArgument: out of order, or before its arena came.
  absl::StatusOr<bool> Submit(uint32_t local_rank, uint64_t submitted_round, TimePoint now);
  // Local ranks that have not submitted, while others have; else empty.
  std::vector<uint32_t> MissingWorkers() const;

  // Null when the bucket has no such part.
  Part* FindPart(uint32_t part);
  // A chunk of `part` has come and been decoded. True when that was the part's last.
  bool FinishChunk(Part& part, const RoundResult& received);
  // All of the round's parts are here, the result is complete: the bucket is idle again.
  void FinishRound(const Part& last, TimePoint now);
  // Chunks of the part in flight: those without a result, and all.
  std::pair<uint32_t, uint32_t> Outstanding();

  // The workers' shares from element `begin` on, by local rank.
  std::vector<const void*> Shares(uint64_t begin) const;
  // The node's share of a chunk in wire type, which the payload refers to and keeps.
  Payload EncodedShare(const Part& part, uint32_t chunk);

  bool in_flight() const { return ready; }
  uint64_t RawBytes() const { return dense.Elems() * SizeOf(layout.dtype); }

  BucketId id;
  BucketLayout layout;
  std::string owner;  // who announced it first, "rank 3"
  DType share = DType::kFloat32;
  Part dense;                                      // the whole bucket
  std::unique_ptr<PowerSgd> power_sgd;             // null: the bucket is never compressed
  std::vector<std::optional<BucketArena>> inputs;  // by local rank
  std::optional<BucketArena> result;
  std::unique_ptr<std::byte[]> encoded;  // null if a worker's arena is what is sent

  // Round.
  uint64_t round = 0;           // in flight, or the last one
  std::vector<bool> submitted;  // by local rank, to round + 1 or the round in flight
  uint32_t num_submitted = 0;
  TimePoint first_submit;
  bool ready = false;  // all have submitted, results are outstanding
  TimePoint ready_since;
  bool compressed = false;
  Part* last_part = nullptr;     // of a compressed round: with its result the round ends
  uint32_t finished_chunks = 0;  // of all parts
  uint32_t workers = 0;          // that the result is the mean over
  Duration reduce_time{};
  Duration wait_time{};
  std::optional<TimePoint> first_sent;
  Duration wire_time{};

 private:
  NodeBucket(BucketId bucket_id, const BucketLayout& bucket_layout, const BucketTerms& terms);
};

}  // namespace thalweg
