// The exchange between a node and one aggregator shard, as both see it, without any transport:
// server/transport carries these calls over gRPC, embedded mode makes them directly.
//
//   node                                   shard
//    │ MeasureLink ──────────────────────▶
//    │ Join ─────────────────────────────▶ waits until every node of the job has joined
//    │ ◀──────────────────────── Membership
//    │ Attach(sink) ─────────────────────▶ from now on results go to the sink
//    │ RegisterBucket ───────────────────▶ refuses a layout that differs between nodes
//    │ Contribute (per chunk) ───────────▶ holds it; the last one of a round makes it fold
//    │ ◀──────────────────── sink.OnResult to every node, the same bytes
//    │ Leave ────────────────────────────▶
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/clock.h"
#include "core/base/codec_cost.h"
#include "core/base/codec_policy.h"
#include "core/base/host_clock.h"
#include "core/base/layout.h"
#include "core/base/payload.h"
#include "core/base/wire_format.h"

namespace thalweg {

// What the way between a node and its shards carries, once each way.
struct LinkSpeed {
  double bytes_per_second = 0;  // 0: there is no network in between
  Duration round_trip{};
};

// What a node says of itself and of the job when it joins; everything but the first three fields,
// the link and the costs must be the same on all nodes of a job.
struct JoinRequest {
  uint32_t node = 0;      // 0 … num_nodes-1
  std::string node_name;  // for people: host name and process
  uint32_t workers = 0;   // how many workers this node stands for
  std::string job;
  uint32_t num_nodes = 0;
  uint32_t world_size = 0;  // workers of all nodes together
  uint32_t shard = 0;       // which of the job's shards the caller takes this one for
  uint32_t num_shards = 0;
  uint64_t chunk_bytes = 0;    // ChunkPlan::For's argument; 0: the shard chooses
  uint32_t window_chunks = 0;  // 0: the shard chooses
  CodecPolicy codec;
  Duration round_timeout{};  // how long a round waits for its last contribution
  LinkSpeed link;            // as this node has measured it
  // As this node has measured them, for what auto chooses from: as many on all nodes.
  std::vector<CodecCost> costs;
};

// A member's key to its job on one shard. Random; 0 is never valid.
using SessionToken = uint64_t;

// The job's membership while its epoch lasts.
struct Membership {
  SessionToken token = 0;
  uint64_t epoch = 0;
  uint64_t chunk_bytes = 0;
  // Most chunks the node may have contributed without having got their results.
  uint32_t window_chunks = 0;
  // How much of the gradients this shard wants to sum, in proportion to the other shards' weights.
  uint32_t weight = 1;
  // The slowest of all nodes: of those that have a network in between, and each cost by itself.
  LinkSpeed link = {};
  std::vector<CodecCost> costs = {};
};

// What the nodes say of a bucket, or of a part of one, before its first contribution; the same on
// all of them.
struct BucketAnnouncement {
  BucketId id;
  BucketLayout layout;
  WireFormat wire = WireFormat::kFloat32;  // in which its chunks cross the network
  uint64_t placement = 0;                  // fingerprint of which chunk goes to which shard
  // Bytes of gradient that one contribution of all its chunks stands for; nothing but statistics
  // depends on it.
  uint64_t raw_bytes = 0;
};

// Names one chunk of one round. Round numbers of a chunk start at 1 and have no gaps.
struct RoundId {
  BucketId bucket;
  uint32_t chunk = 0;
  uint64_t round = 0;

  auto operator<=>(const RoundId&) const = default;
};

// One node's share of a chunk: the mean over its workers, in wire format.
struct Contribution {
  RoundId id;
  uint64_t epoch = 0;
  WireFormat wire = WireFormat::kFloat32;
  uint64_t elems = 0;
  Payload payload;  // IsPayloadSize(wire, elems, …)
};

// The mean over all workers of the job, in wire format; the same bytes for every node.
struct RoundResult {
  RoundId id;
  uint64_t epoch = 0;
  WireFormat wire = WireFormat::kFloat32;
  uint64_t elems = 0;
  uint32_t workers = 0;          // how many workers the mean is over
  uint64_t nonfinite_elems = 0;  // NaN and infinities among the results
  Payload payload;
};

// "job 'name': …": the status with the job it is about, once. Errors pass through several hands on
// their way to the workers, each of which may be the first to know the job.
bool IsOfJob(const std::string& job, const absl::Status& status);
absl::Status OfJob(const std::string& job, const absl::Status& status);

// What a shard tells a node. Implemented by the sidecar and by the transport's server side.
// Calls come from any thread, also concurrently, and must neither block nor call back into the
// shard.
class NodeSink {
 public:
  virtual ~NodeSink() = default;
  virtual void OnResult(RoundResult result) = 0;
  // Results that were taken by OnResult and that nobody has begun to send yet.
  virtual uint32_t Backlog() const { return 0; }
  // The job has failed: `why` names job, bucket, round and who was missing. The last call made.
  virtual void OnFailed(absl::Status why) = 0;
};

// One aggregator shard as a node sees it. Implemented by the aggregator itself and by the
// transport's client side. Thread-safe.
class Shard {
 public:
  virtual ~Shard() = default;

  // Finds out what the way to this shard carries; takes some tens of milliseconds. Errors:
  // Unavailable (no aggregator there), DeadlineExceeded.
  virtual absl::StatusOr<LinkSpeed> MeasureLink(TimePoint deadline) = 0;

  // Blocks until all nodes of the job have joined, or `deadline`. Errors: InvalidArgument (what the
  // nodes say of the job differs), AlreadyExists (that node has joined), DeadlineExceeded (naming
  // the nodes that are missing), Unavailable (no aggregator there).
  virtual absl::StatusOr<Membership> Join(const JoinRequest& request, TimePoint deadline) = 0;

  // Results and failures go to `sink` from now on. Once per token.
  // Shared: the shard may be about to call the sink while its owner lets go of it.
  virtual absl::Status Attach(SessionToken token, std::shared_ptr<NodeSink> sink) = 0;

  // Announces a bucket; a new generation replaces the old one. Blocks for one round trip at most.
  // InvalidArgument names both nodes, and the tensor, when another node announced something else.
  virtual absl::Status RegisterBucket(SessionToken token, const BucketAnnouncement& bucket,
                                      TimePoint deadline) = 0;

  // Does not block. Repeating a contribution is harmless: it counts once.
  virtual absl::Status Contribute(SessionToken token, Contribution contribution) = 0;

  // What the shard's encoding of a chunk's results has left out so far and will add to the next one
  // (docs/codecs.md), for a checkpoint: an element for each of the chunk; empty when the shard has
  // none yet, which is the same as zeros. For parts in int8 and onebit.
  // A node may read, and write, while it has the results of all rounds that it has contributed to:
  // then the residual belongs to the last of them. Writing puts `values` in the residual's place;
  // one node, the first, does it for all.
  // Errors change nothing and do not fail the job: FailedPrecondition (the part is not registered
  // in this layout), InvalidArgument (no such chunk, another format, another number of values than
  // the chunk has elements, or one that is not finite).
  virtual absl::StatusOr<std::vector<float>> ReadResidual(SessionToken token, BucketId bucket,
                                                          uint32_t chunk, TimePoint deadline) = 0;
  virtual absl::Status WriteResidual(SessionToken token, BucketId bucket, uint32_t chunk,
                                     std::span<const float> values, TimePoint deadline) = 0;

  // Says that the node is alive; a node not heard of for kLease is taken for lost. Gives what the
  // shard's clock says.
  virtual absl::StatusOr<ClockReading> Heartbeat(SessionToken token, TimePoint deadline) = 0;

  // Ends the membership. With OK the node is done: rounds it still owes fail with its name.
  // Otherwise the whole job fails at once, for `reason`. Idempotent.
  virtual void Leave(SessionToken token, const absl::Status& reason) = 0;
};

// How long a shard believes in a node it does not hear of, and how often nodes speak.
inline constexpr Duration kLease = std::chrono::seconds(10);
inline constexpr Duration kHeartbeatInterval = std::chrono::seconds(2);

}  // namespace thalweg
