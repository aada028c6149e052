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
//
// A shard keeps everything in memory. When it has been restarted, its nodes join again with
// JoinRequest::resume, announce their buckets, Supply the results that the shard wants of them, and
// repeat the contributions that have no result (server/sidecar/returning_shard.h).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/clock.h"
#include "core/base/codec_cost.h"
#include "core/base/codec_policy.h"
#include "core/base/collective.h"
#include "core/base/host_clock.h"
#include "core/base/job_signer.h"
#include "core/base/layout.h"
#include "core/base/loss_scale.h"
#include "core/base/payload.h"
#include "core/base/shard_place.h"
#include "core/base/tenant.h"
#include "core/base/wire_format.h"

namespace thalweg {

// LinkSpeed is the speed of the link between a node and its shards, once in each direction.
struct LinkSpeed {
  double bytes_per_second = 0;  // 0: there is no network
  Duration round_trip{};
};

// BucketRounds name one round for each of the first chunks of a bucket or part; 0 names none.
struct BucketRounds {
  BucketId bucket;
  std::vector<uint64_t> rounds;  // by chunk

  bool operator==(const BucketRounds&) const = default;
};

// A JoinRequest describes the node and its job. Everything except the first three fields, the link,
// the costs, the rates and the rounds must be the same on all nodes of a job; and either all of
// them resume the job or none does.
//
// Job and identity together name the job on a shard: whoever does not know its secret can only name
// another one.
struct JoinRequest {
  uint32_t node = 0;      // 0 … num_nodes-1
  std::string node_name;  // for people: host name and process
  uint32_t workers = 0;   // number of this node's workers
  std::string job;
  uint32_t num_nodes = 0;
  uint32_t world_size = 0;  // workers of all nodes together
  uint32_t shard = 0;       // number of this shard in the job, as the caller has it
  uint32_t num_shards = 0;
  uint64_t chunk_bytes = 0;    // ChunkPlan::For's argument; 0: the shard chooses
  uint32_t window_chunks = 0;  // 0: the shard chooses
  CodecPolicy codec;
  Duration round_timeout{};  // how long a round waits for its last contribution
  LinkSpeed link;            // as measured by this node
  // Costs of what auto chooses from, as measured by this node; all nodes give equally many.
  std::vector<CodecCost> costs;
  // By shard: the node that hosts it, or kNoHost. A node hosts at most one. Empty: none is hosted.
  std::vector<uint32_t> hosts;
  // By shard, only for the job's first one: the rate in bytes per second at which this node could
  // send to it; 0: not measured. Empty: none is measured.
  std::vector<double> shard_rates;
  // The public key that belongs to the job's secret; empty: the job has none. A caller in the same
  // process is believed, one on another machine must prove that it knows the secret.
  std::string identity;
  // Proves the identity to a RemoteShard's other end. It never leaves the process.
  std::shared_ptr<const JobSigner> signer;
  // What the transport knows of a caller on another machine. A caller in the same process has none
  // and is believed.
  std::optional<PeerNames> peer;
  // Set when the job has begun on this shard and the shard has forgotten it: the last rounds whose
  // results this node has, 0 for chunks that other shards sum. At most kMaxResumedChunks numbers.
  // chunk_bytes and window_chunks are then what the shard answered at first.
  std::optional<std::vector<BucketRounds>> resume = std::nullopt;
};

// A member's key to its job on one shard. It is random; 0 is never valid.
using SessionToken = uint64_t;

// An Advice names what would shorten an exchange most.
enum class Advice : uint8_t {
  kNone = 0,         // the rates are unknown, or there is one node
  kAggregator = 1,   // one more, with a machine like those that there are
  kLocalShards = 2,  // a shard on every node
  kFewerBytes = 3,   // no shard: a codec that sends less, or a faster link
};

// A ShareForecast says how long the shares of a job's shards keep the links busy.
struct ShareForecast {
  double seconds_per_byte = 0;       // of encoded gradient; 0: the links' rates are unknown
  double ring_seconds_per_byte = 0;  // what a ring all-reduce over the nodes would take
  // The link that takes longest: that of a shard with a machine of its own, or of a node.
  bool at_shard = false;
  uint32_t number = 0;  // of the shard or node
  double load = 0;      // bytes that the link carries each way for a byte of gradient
  Advice advice = Advice::kNone;
  double advised_seconds_per_byte = 0;  // with one more aggregator, or with shards on all nodes

  bool operator==(const ShareForecast&) const = default;
};

// The shares of a job's shards sum up to this. All numbers up to 16 divide it, so that as many
// shards can have exactly equal shares.
inline constexpr uint32_t kShareTotal = 720'720;

// A Membership describes the job while its epoch lasts.
struct Membership {
  SessionToken token = 0;
  uint64_t epoch = 0;
  uint64_t chunk_bytes = 0;
  // The node may have at most this many contributed chunks without a result.
  uint32_t window_chunks = 0;
  // If any shard of the job has a weight, each sums a part of the gradients in proportion to its
  // weight, and 0 counts as 1. Otherwise the first shard's `shares` decide.
  uint32_t weight = 0;
  // The slowest link of all nodes that have a network in between, and the largest of each cost.
  LinkSpeed link = {};
  std::vector<CodecCost> costs = {};
  // By shard, only from the job's first one: its part of the gradients in units of 1/kShareTotal,
  // chosen for the rates of the links, and what that predicts.
  std::vector<uint32_t> shares = {};
  ShareForecast forecast = {};
  bool resumed = false;  // as the request has asked for
  // The results that this node must Supply, because others lack them.
  std::vector<BucketRounds> wanted = {};
};

// A BucketAnnouncement describes a bucket, or a part of one, before its first contribution; all
// nodes must announce the same.
struct BucketAnnouncement {
  BucketId id;
  BucketLayout layout;
  WireFormat wire = WireFormat::kFloat32;  // format in which its chunks cross the network
  uint64_t placement = 0;                  // fingerprint of the placement of chunks on shards
  // One contribution of all its chunks represents this many bytes of gradient; used for statistics
  // only.
  uint64_t raw_bytes = 0;
};

// A RoundId names one chunk of one round. Round numbers of a chunk start at 1 and have no gaps.
struct RoundId {
  BucketId bucket;
  uint32_t chunk = 0;
  uint64_t round = 0;

  auto operator<=>(const RoundId&) const = default;
};

// A one-shot round belongs to no bucket: it has this in the bucket's place, and `round` is its
// sequence number in its group, from 1. Rounds of several numbers may be open at once, and nothing
// of them stays.
constexpr BucketId OneShotsOf(uint32_t group) { return {0xffff'ffff, group, 0}; }
constexpr bool IsOneShot(const RoundId& id) { return id.bucket.index == OneShotsOf(0).index; }

// Returns "bucket 3 round 5 chunk 0" or "one-shot round 5 of group 2 chunk 0".
std::string ToString(const RoundId& id);

// A Contribution is one node's share of a chunk, in wire format: for a mean, that over its workers.
// All nodes of the round's group name the same group and collective, and the first one's timeout
// counts.
struct Contribution {
  RoundId id;
  uint64_t epoch = 0;
  WireFormat wire = WireFormat::kFloat32;
  uint64_t elems = 0;
  Payload payload;  // IsPayloadSize(wire, elems, …); empty if nothing is wanted from the node
  // The loss scale that the node's gradients carry. Only in formats that HasResidual.
  double loss_scale = kUnknownLossScale;
  uint32_t group = 0;
  Collective collective = {};
  Duration timeout{};  // how long the round waits for the last contribution; 0: the job's
  // This node has the results of all of the group's one-shot rounds up to this number.
  uint64_t settled = 0;
};

// A RoundResult is what a round gives, in wire format; all nodes that get it get the same bytes.
struct RoundResult {
  RoundId id;
  uint64_t epoch = 0;
  WireFormat wire = WireFormat::kFloat32;
  uint64_t elems = 0;
  uint32_t workers = 0;          // number of workers whose values are in it
  uint64_t nonfinite_elems = 0;  // number of NaN and infinite elements
  Payload payload;
};

// Prefixes the status with "job 'name': ", unless it has the prefix. Errors pass through several
// layers on their way to the workers, each of which may be the first to know the job.
bool IsOfJob(const std::string& job, const absl::Status& status);
absl::Status OfJob(const std::string& job, const absl::Status& status);

// A NodeSink receives what a shard tells a node. The sidecar and the transport's server side
// implement it. Calls come from any thread, also concurrently, and must neither block nor call back
// into the shard.
class NodeSink {
 public:
  virtual ~NodeSink() = default;
  virtual void OnResult(RoundResult result) = 0;
  // Returns how many results OnResult has taken whose sending has not begun.
  virtual uint32_t Backlog() const { return 0; }
  // Returns how many times a connection to the node has broken and come back.
  virtual uint64_t Reconnections() const { return 0; }
  // Reports that the job has failed: `why` names job, bucket, round and the missing nodes. NotFound
  // means instead that the shard does not know the membership: it has been restarted. It is the
  // last call made.
  virtual void OnFailed(absl::Status why) = 0;
};

// A Shard is one aggregator shard as a node sees it. The aggregator itself and the transport's
// client side implement it. Thread-safe.
class Shard {
 public:
  virtual ~Shard() = default;

  // Measures the link to this shard; takes some tens of milliseconds. Errors: Unavailable (no
  // aggregator there), DeadlineExceeded.
  virtual absl::StatusOr<LinkSpeed> MeasureLink(TimePoint deadline) = 0;

  // Blocks until all nodes of the job have joined, or `deadline`. Errors: InvalidArgument (the
  // nodes disagree about the job), AlreadyExists (that node has joined), DeadlineExceeded (names
  // the missing nodes), Unavailable (no aggregator there), PermissionDenied (the identity has not
  // been proved, or the shard does not serve the job, or not to this peer), ResourceExhausted (the
  // shard or the peer's tenant has too many jobs, or too little memory).
  virtual absl::StatusOr<Membership> Join(const JoinRequest& request, TimePoint deadline) = 0;

  // Returns the PeerNames::Principal of the node's Join, which calls for the membership must show
  // again; empty if they need not, because the shard has no policy or there is no such membership.
  virtual std::string PrincipalOf(SessionToken /*token*/) { return ""; }

  // Sends results and failures to `sink` from now on. Call once per token, with the identity of its
  // Join: PermissionDenied refuses another one. The ownership is shared because the shard may be
  // about to call the sink while its owner releases it.
  virtual absl::Status Attach(SessionToken token, const std::string& identity,
                              std::shared_ptr<NodeSink> sink) = 0;

  // Announces a bucket; a new generation replaces the old one. Blocks for one round trip at most.
  // InvalidArgument names both nodes and the tensor when another node announced something else.
  virtual absl::Status RegisterBucket(SessionToken token, const BucketAnnouncement& bucket,
                                      TimePoint deadline) = 0;

  // Contributes without blocking. Repeating a contribution is harmless: it counts once.
  virtual absl::Status Contribute(SessionToken token, Contribution contribution) = 0;

  // Gives the shard, without blocking, a result that Membership::wanted names. Nodes that repeat
  // their contribution to that round get it.
  virtual absl::Status Supply(SessionToken token, RoundResult result) = 0;

  // Read or write, for a checkpoint, what the shard's encoding of a chunk's results has left out so
  // far and will add to the next one (docs/codecs.md), in true units: without the loss scale that
  // contributions name. The values have one element for each of the chunk; an empty result means
  // that the shard has no residual yet, which is the same as zeros. Both apply to parts in a format
  // that HasResidual. A node may read and write while it has the results of all rounds that it has
  // contributed to: the residual then belongs to the last of them. Writing replaces the residual;
  // one node, the first, does it for all. Errors change nothing and do not fail the job:
  // FailedPrecondition (the part is not registered in this layout), InvalidArgument (no such chunk,
  // another format, a number of values that differs from the chunk's elements, or a value that is
  // not finite).
  virtual absl::StatusOr<std::vector<float>> ReadResidual(SessionToken token, BucketId bucket,
                                                          uint32_t chunk, TimePoint deadline) = 0;
  virtual absl::Status WriteResidual(SessionToken token, BucketId bucket, uint32_t chunk,
                                     std::span<const float> values, TimePoint deadline) = 0;

  // Reports that the node is alive; a node that is silent for kLease is treated as lost. Returns
  // the shard's clock.
  virtual absl::StatusOr<ClockReading> Heartbeat(SessionToken token, TimePoint deadline) = 0;

  // Ends the membership. With OK the node is done: rounds that still need it fail with its name.
  // Otherwise the whole job fails at once, for `reason`. Idempotent.
  virtual void Leave(SessionToken token, const absl::Status& reason) = 0;
};

// A shard treats a node as lost after kLease without a heartbeat; nodes send one at this interval.
// The lease covers a connection that breaks and comes back: 10 s in which it may be away, and the
// time until the next heartbeat.
inline constexpr Duration kLease = std::chrono::seconds(15);
inline constexpr Duration kHeartbeatInterval = std::chrono::seconds(2);

}  // namespace thalweg
