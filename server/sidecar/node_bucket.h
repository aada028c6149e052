// One bucket on one node: its memory, its codecs, and how far the current round has come.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/clock.h"
#include "core/base/codec_policy.h"
#include "core/base/exchange.h"
#include "core/base/layout.h"
#include "server/sidecar/codec/bucket_codec.h"
#include "server/sidecar/codec/dense_codec.h"
#include "server/sidecar/codec/parameter_states.h"
#include "server/sidecar/device/device.h"
#include "server/sidecar/part.h"

namespace thalweg {

// What all buckets of a job have in common on this node.
struct BucketTerms {
  CodecPolicy codec;
  uint64_t chunk_bytes = 0;
  uint32_t num_shards = 1;
  uint32_t num_nodes = 1;
  uint32_t local_size = 1;
  Device* device = nullptr;
  Duration patience{};                     // how long a device may take for what is queued on it
  GradientPath path = GradientPath::kCpu;  // of the worker, if the node has one only
};

// The members above "Round" never change after Create and AddInput; the others are guarded by the
// mutex of the NodeJob that owns the bucket. While a round is in flight what `memory` holds belongs
// to the round: the job's threads read the shares and write disjoint pieces of the result.
class NodeBucket : public std::enable_shared_from_this<NodeBucket> {
 public:
  // `auto_choice` is the number, among the policy's codecs, of what auto has chosen for this
  // bucket. `states` is the job's.
  static absl::StatusOr<std::shared_ptr<NodeBucket>> Create(BucketId id, const BucketLayout& layout,
                                                            const std::string& owner,
                                                            const BucketTerms& terms,
                                                            uint32_t auto_choice,
                                                            ParameterStates& states);

  // Where worker `local_rank` will put its share, in type `share`.
  absl::Status AddInput(uint32_t local_rank, UniqueFd fd, const DeviceMemory& device_memory);

  // Begins round `round` for this worker. True when that makes it ready: all workers have submitted
  // it. InvalidArgument: out of order, or before its arena came.
  absl::StatusOr<bool> Submit(uint32_t local_rank, uint64_t submitted_round, TimePoint now);
  // Local ranks that have not submitted, while others have; else empty.
  std::vector<uint32_t> MissingWorkers() const;

  // Local ranks whose share of the round in flight is not there, or not whole.
  std::vector<uint32_t> UnfilledBy() const;

  // The codec whose part that is; null when the bucket has no such part.
  BucketCodec* FindCodec(uint32_t part);
  // Those that the round in flight goes through.
  std::vector<BucketCodec*> CodecsInUse();
  // A chunk of `part` has come and been decoded. True when that was the part's last.
  bool FinishChunk(Part& part, const RoundResult& received);
  // One of the codecs in use has its result. True when it was the last: the round is over.
  bool FinishCodec(const Part& last);
  // The round is over, and its result where workers will find it: the bucket is idle again.
  void FinishRound(TimePoint now);
  // Chunks of the part in flight: those without a result, and all.
  std::pair<uint32_t, uint32_t> Outstanding();

  bool in_flight() const { return ready; }

  BucketId id;
  BucketLayout layout;
  std::string owner;  // who announced it first, "rank 3"
  DType share = DType::kFloat32;
  std::unique_ptr<BucketMemory> memory;
  std::unique_ptr<DenseCodec> dense;  // the whole bucket, until `codecs` have started
  // Empty when the bucket is never compressed. Each tensor is one's.
  std::vector<std::unique_ptr<BucketCodec>> codecs;

  // Round.
  uint64_t round = 0;           // in flight, or the last one
  std::vector<bool> submitted;  // by local rank, to round + 1 or the round in flight
  uint32_t num_submitted = 0;
  TimePoint first_submit;
  bool ready = false;  // all have submitted, results are outstanding
  TimePoint ready_since;
  bool compressed = false;       // through `codecs`, not `dense`
  size_t codecs_left = 0;        // in use, that have not got their results
  uint32_t finished_chunks = 0;  // of all parts
  uint32_t workers = 0;          // that the result is the mean over
  Duration reduce_time{};
  Duration wait_time{};
  Duration decode_time{};
  std::optional<TimePoint> first_sent;
  Duration wire_time{};

 private:
  NodeBucket(BucketId bucket_id, const BucketLayout& bucket_layout, const BucketTerms& terms);
};

}  // namespace thalweg
