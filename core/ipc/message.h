// This header defines the messages between workers and their sidecar, and their bytes.
//
// A message is one frame on the stream. Integers are little-endian.
//
//   byte  size  field
//   0     4   A magic       "THW1"
//   4     2   B type        1 … 31, in the order of Message's alternatives
//   6     2   C flags       1: a file descriptor comes with the frame's first byte; else 0
//   8     4   D body bytes  at most kMaxFrameBytes
//   12    D   E body        the message's fields in the order of their declaration, without
//   padding:
//
//   u32, u64, i64   as they are
//   f64             IEEE 754
//   bool            u8, 0 or 1
//   DType, GradientPath, CollectiveKind, Fold, Optimizer, SnapshotAction, WireFormat  u8, one of
//   the valid values CodecPolicy     string, as CodecPolicy::ToString writes it StatusCode u32, 1 …
//   16 (never OK) string          u32 length, then the bytes DeviceMemory    its three strings
//   ShardPlace      string address, u32 host
//   list            u32 count, then each u32 (at most kMaxTensors), u64, ShardPlace or string
//                   (kMaxShards), GroupStep (kMaxUpdateGroups) or f64 (kMaxFrameBytes / 8)
//   optional        bool, then the value if it is there
//   BucketId        u32 index, u32 generation
//   BucketLayout    DType dtype, u32 count (at most kMaxTensors), then each TensorSpec
//   TensorSpec      string name, u32 count (at most kMaxDims), then each dimension as i64
//   UpdateRule, GroupStep, JobTerms  their fields
//
// A layout's dimensions are not negative, and its elements, counting 0-sized dimensions as 1, are
// at most kMaxBucketElems. There is exactly one encoding of a message. docs/ipc.md has a worked
// example.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/codec_policy.h"
#include "core/base/collective_kind.h"
#include "core/base/dtype.h"
#include "core/base/fold.h"
#include "core/base/gradient_path.h"
#include "core/base/layout.h"
#include "core/base/protocol.h"
#include "core/base/shard_place.h"
#include "core/base/snapshots.h"
#include "core/base/update.h"
#include "core/ipc/device_memory.h"

namespace thalweg::ipc {

// JobTerms are what the job's shards have answered when this node joined: what a sidecar needs to
// know that takes up the job of an earlier process.
struct JobTerms {
  std::vector<uint64_t> epochs;  // by shard
  uint32_t window_chunks = 0;
  std::vector<uint32_t> shares;  // by shard: its part of the gradients
  // By which codec auto chooses; empty for other codecs. Its content is the sidecar's own.
  std::vector<double> measured;
  bool operator==(const JobTerms&) const = default;
};

// Hello is a worker's first message on a connection and describes the worker.
struct Hello {
  uint32_t ipc_version = 0;  // kIpcVersion
  std::string job;
  uint32_t rank = 0;
  uint32_t world_size = 0;
  uint32_t node = 0;
  uint32_t num_nodes = 0;
  std::string node_name;
  uint32_t local_rank = 0;
  uint32_t local_size = 0;
  CodecPolicy codec;
  uint64_t chunk_bytes = 0;                // 0: the sidecar chooses
  uint64_t timeout_ms = 0;                 // without a sign of life
  uint64_t step_timeout_ms = 0;            // of a round that waits for others' gradients
  GradientPath path = GradientPath::kCpu;  // used unless the sidecar can work on a device's memory
  // memory for the sidecar to test sharing with; empty: no sharing
  DeviceMemory probe;
  // The job's shards in order, equal on all nodes; empty: those that the sidecar is configured
  // with.
  std::vector<ShardPlace> shards;
  std::string secret;  // of the job, as 64 hexadecimal digits; empty: it has none
  // Set by a worker that was welcome to an earlier process of the sidecar: what that has said, and
  // how many KeptBuckets follow.
  std::optional<JobTerms> known = {};
  uint32_t kept_buckets = 0;
  uint64_t compressed_since = 0;  // as Complete has said
  // The job goes on when nodes are lost as long as so many are left; 0: it needs all. A node is
  // lost that has been silent for this time and an interval.
  uint32_t min_nodes = 0;
  uint64_t loss_grace_ms = 0;
  bool returns = false;  // if the sidecar is killed, the worker looks for another process of it
  bool operator==(const Hello&) const = default;
};

// Welcome is the sidecar's message that all workers of the job are connected.
struct Welcome {
  uint64_t epoch = 0;
  uint32_t num_shards = 0;
  std::string server_version;
  uint64_t chunk_bytes = 0;                // as agreed by all nodes
  GradientPath path = GradientPath::kCpu;  // the path of this worker's gradients
  std::string placement = {};  // for people: how the nodes use the shards; empty on a single node
  JobTerms terms = {};
  bool operator==(const Welcome&) const = default;
};

// RegisterBucket is a worker's announcement of a bucket. Its descriptor is the arena that will hold
// the gradients; otherwise they lie in the memory of a GPU. With an update the shards keep the
// bucket's weights, and results are their new values.
struct RegisterBucket {
  BucketId id;
  BucketLayout layout;
  DeviceMemory memory;
  std::optional<UpdateRule> update = {};
  bool operator==(const RegisterBucket&) const = default;
};

// BucketReady is the sidecar's answer that the bucket is registered. Its descriptor is the arena
// that will hold the results. On a GPU they lie in `memory`, and only the arena's counter is used.
struct BucketReady {
  BucketId id;
  DeviceMemory memory;
  bool operator==(const BucketReady&) const = default;
};

// Submit is a worker's message that a round begins; the arena fills chunk by chunk.
struct Submit {
  BucketId id;
  uint64_t round = 0;
  // Numbers of the bucket's tensors that took no part in the worker's backward pass: their
  // gradients are zero.
  std::vector<uint32_t> unused = {};
  uint64_t settings = 0;  // number of those for the update that the round does; 0: it does none
  UpdateRound kind = UpdateRound::kPush;  // of the round; the arena has a gradient only in a push
  uint64_t waited_ns = 0;  // for which the worker has waited for the bucket's last weights
  bool operator==(const Submit&) const = default;
};

// Complete is the sidecar's message that the round's result is complete in the result arena.
struct Complete {
  BucketId id;
  uint64_t round = 0;
  uint32_t workers = 0;  // number of workers in the mean
  uint64_t nonfinite_elems = 0;
  uint64_t wire_bytes_sent = 0;
  uint64_t wire_bytes_received = 0;
  uint64_t link_bytes_sent = 0;  // with what the node's shard sent, without what it got from here
  uint64_t reduce_ns = 0;
  uint64_t wait_ns = 0;
  uint64_t wire_ns = 0;
  uint64_t decode_ns = 0;
  uint64_t compressed_since = 0;  // first compressed iteration, from 1; 0: none yet
  // These two are sampled over everything that is compressed: the norm of what is left for later,
  // and its ratio to the norm of what was to be sent.
  double residual_norm = 0;
  double error_ratio = 0;
  // They are set where a bucket's update commits, in the rounds before the pull: the sums of the
  // squares of the mean, by granule, or where the round measures, those of the weights and then
  // those of the update. There is no result in the arena then.
  std::vector<double> squares = {};
  bool operator==(const Complete&) const = default;
};

// Fail is sent by either side: the job is over, for this reason. `code` is never kOk.
struct Fail {
  absl::StatusCode code = absl::StatusCode::kUnknown;
  std::string message;
  bool operator==(const Fail&) const = default;
};

// Leave is a worker's message that it is done without an error.
struct Leave {
  bool operator==(const Leave&) const = default;
};

// GetCodecState is a worker's request for what the codec carries from round to round. Nothing may
// be in flight.
struct GetCodecState {
  bool operator==(const GetCodecState&) const = default;
};

// CodecState is the sidecar's answer with that state, or a worker's request to restore it. The
// descriptor is an arena that holds it.
struct CodecState {
  uint64_t bytes = 0;
  bool operator==(const CodecState&) const = default;
};

// Precision is sent by a node's first worker at any time: the state of loss scaling.
struct Precision {
  double loss_scale = 0;       // that gradients carry from now on; 0: unknown
  uint64_t skipped_steps = 0;  // since the previous such message
  bool operator==(const Precision&) const = default;
};

// HostShard asks the sidecar to serve a shard to the nodes of a job. It takes the place of Hello;
// the shard admits them while the connection lasts.
struct HostShard {
  uint32_t ipc_version = 0;  // kIpcVersion
  std::string job;
  std::string secret;  // as in Hello
  bool operator==(const HostShard&) const = default;
};

// ShardHosted is the sidecar's answer.
struct ShardHosted {
  std::string address;                   // host:port of its shard; empty: it hosts none
  std::vector<std::string> aggregators;  // that the sidecar is configured with
  bool operator==(const ShardHosted&) const = default;
};

// Alive is a sign of life: a worker sends it all the time, the sidecar while workers wait for it.
struct Alive {
  bool operator==(const Alive&) const = default;
};

// MakeGroup is a worker's message that it takes part in a group of workers; all of them say the
// same, but for their own rank. It comes before the group's first collective.
struct MakeGroup {
  uint32_t group = 0;           // its number in the job, not 0
  uint32_t rank = 0;            // of this worker in the group
  std::vector<uint32_t> nodes;  // by rank in the group: the number of its node
  std::string name;             // for people
  bool operator==(const MakeGroup&) const = default;
};

// ShareArena gives the peer a descriptor: an arena for values of collectives, for as long as the
// connection lasts.
struct ShareArena {
  uint32_t number = 0;  // as the sender counts its arenas, from 1
  uint64_t bytes = 0;
  bool operator==(const ShareArena&) const = default;
};

// Collect is a worker's message that it takes part in a collective. Its values, as many units
// (collective_kind.h) as it gives, are in `values` or at the beginning of an arena. Those in an
// arena may still be copied: its count says how many blocks of kReadyBlockBytes are there.
struct Collect {
  uint32_t group = 0;
  uint64_t sequence = 0;  // of the group's collectives, from 1, without gaps
  CollectiveKind kind = CollectiveKind::kBarrier;
  Fold fold = Fold::kNone;  // kNone: bytes pass
  DType dtype = DType::kUInt8;
  uint32_t root = 0;   // rank in the group; 0 without a root
  uint64_t elems = 0;  // of one unit
  uint64_t timeout_ms = 0;
  uint32_t arena = 0;  // 0: none
  std::string values;
  bool operator==(const Collect&) const = default;
};

// Send is a worker's message that it gives values to one other worker of a group. They are in
// `values` or at the beginning of an arena, all of them there already.
struct Send {
  uint32_t group = 0;
  uint64_t call = 0;  // number among the worker's Send and Receive, from 1, without gaps
  uint32_t to = 0;    // rank in the group
  uint64_t tag = 0;
  uint64_t bytes = 0;
  uint64_t timeout_ms = 0;
  uint32_t arena = 0;  // 0: none
  std::string values;
  bool operator==(const Send&) const = default;
};

// Receive is a worker's message that it takes what a worker of the group gives it under a tag: each
// Receive takes one Send, in the order of both.
struct Receive {
  uint32_t group = 0;
  uint64_t call = 0;  // as in Send
  uint32_t from = 0;  // rank in the group; kFromAnyone
  uint64_t tag = 0;
  uint64_t bytes = 0;
  uint64_t timeout_ms = 0;
  bool operator==(const Receive&) const = default;
};
inline constexpr uint32_t kFromAnyone = 0xffff'ffff;

// Collected is the sidecar's message that a worker's collective is done: what the worker gets is in
// `values` or in an arena of the sidecar's. With group 0 it is about a Send or Receive.
struct Collected {
  uint32_t group = 0;
  uint64_t sequence = 0;  // or the call
  uint64_t bytes = 0;
  uint32_t arena = 0;   // 0: in `values`
  uint64_t offset = 0;  // in the arena
  uint32_t from = 0;    // of a Receive: whose values, by rank in the group
  std::string values;
  bool operator==(const Collected&) const = default;
};

// CollectedPart is the sidecar's message that a part of what a Collected will name is there, so
// that the worker can copy it while the rest is under way. Parts do not overlap, need not cover
// all, and come before the Collected.
struct CollectedPart {
  uint32_t group = 0;
  uint64_t sequence = 0;
  uint32_t arena = 0;
  uint64_t offset = 0;  // in the arena, of what the worker gets
  uint64_t begin = 0;   // of the part, in what the worker gets
  uint64_t bytes = 0;   // of the part
  bool operator==(const CollectedPart&) const = default;
};

// Taken is a worker's message that it does not need the arena of a Collected any more.
struct Taken {
  uint32_t group = 0;
  uint64_t sequence = 0;
  bool operator==(const Taken&) const = default;
};

// SetSettings is a worker's announcement of settings that its later rounds name; all workers
// announce the same.
struct SetSettings {
  uint64_t number = 0;  // from 1
  UpdateStep step;
  bool operator==(const SetSettings&) const = default;
};

// GetWeights is a worker's request for a slice (core/base/update.h) of what the shards keep of a
// bucket, between two rounds. Weights answer it.
struct GetWeights {
  BucketId id;
  uint32_t slice = 0;
  bool operator==(const GetWeights&) const = default;
};

// Weights are such a slice, whole; a worker sends it to replace what the shards keep, and
// WeightsTaken answers it. The descriptor is an arena that holds the values in fp32; with 0 bytes
// there are none: parameters that nobody has written, or a moment that is zeros.
struct Weights {
  BucketId id;
  uint32_t slice = 0;
  uint64_t steps = 0;  // that the optimizer has done
  uint64_t bytes = 0;
  bool operator==(const Weights&) const = default;
};

// WeightsTaken is the sidecar's answer that the shards have them.
struct WeightsTaken {
  BucketId id;
  uint32_t slice = 0;
  bool operator==(const WeightsTaken&) const = default;
};

// GetSnapshots asks the shards to take or to restore a snapshot of what they keep, or only which
// ones all of them have; see core/base/snapshots.h. The first worker of the job sends it, while
// no update can happen.
struct GetSnapshots {
  SnapshotAction action = SnapshotAction::kList;
  SnapshotId id;  // of the snapshot; zeros for none
  bool operator==(const GetSnapshots&) const = default;
};

// Snapshots answer it with what all shards have by now. If one of them was still writing, none has
// begun to take another.
struct Snapshots {
  SnapshotReport report;
  bool operator==(const Snapshots&) const = default;
};

// Placed is the sidecar's message that the shards know a bucket, before its first round completes:
// what it needs to know if another process takes up the job.
struct Placed {
  BucketId id;
  std::vector<uint32_t> shards;  // by chunk: the shard that sums it
  std::vector<uint64_t> loads;   // by shard: how many bytes these chunks are
  bool operator==(const Placed&) const = default;
};

// CodecMemory is for the node's first worker to hold, before BucketReady: the arena of its
// descriptor has what another process of the sidecar needs of the bucket's codecs. The worker gives
// the last one that it got for a bucket to that process, after KeptBucket and KeptResult.
struct CodecMemory {
  BucketId id;
  uint64_t bytes = 0;
  bool operator==(const CodecMemory&) const = default;
};

// KeptBucket gives the sidecar a bucket that the worker has announced to an earlier process; it
// follows Hello. Its descriptor is the arena of the worker's gradients.
struct KeptBucket {
  BucketId id;
  BucketLayout layout;
  uint64_t round = 0;            // the last one whose result the worker has
  uint64_t nonfinite_elems = 0;  // of that result
  // As Placed has said; empty: it has not come.
  std::vector<uint32_t> shards;
  std::vector<uint64_t> loads;
  bool has_codec_memory = false;  // which follows
  bool operator==(const KeptBucket&) const = default;
};

// KeptResult follows a KeptBucket with a round: its descriptor is the arena of the result.
struct KeptResult {
  BucketId id;
  bool operator==(const KeptResult&) const = default;
};

// Lost is the sidecar's message that the job goes on without a node; both texts are for people.
struct Lost {
  std::string node;
  std::string why;
  bool operator==(const Lost&) const = default;
};

using Message =
    std::variant<Hello, Welcome, RegisterBucket, BucketReady, Submit, Complete, Fail, Leave,
                 GetCodecState, CodecState, Precision, HostShard, ShardHosted, Alive, MakeGroup,
                 ShareArena, Collect, Collected, Taken, Send, Receive, SetSettings, GetWeights,
                 Weights, WeightsTaken, GetSnapshots, Snapshots, CollectedPart, Placed, KeptBucket,
                 KeptResult, CodecMemory, Lost>;

// Values of at most so many bytes travel in the message, without an arena.
inline constexpr uint64_t kMaxInlineBytes = 16 << 10;
// An arena for a collective's values counts what is ready in blocks of this size.
inline constexpr uint64_t kReadyBlockBytes = 256 << 10;
// Parts of a collective's result, if that has at least as many bytes as several of them.
inline constexpr uint64_t kPartBytes = 1 << 20;
inline constexpr uint64_t kFewestParts = 4;

inline constexpr size_t kFrameHeaderBytes = 12;
inline constexpr uint32_t kMaxFrameBytes = 16 << 20;
inline constexpr uint32_t kMaxTensors = 1'000'000;
inline constexpr uint32_t kMaxDims = 64;  // as in torch
inline constexpr uint64_t kMaxBucketElems = uint64_t{1} << 48;

// Returns "Hello", "RegisterBucket" …, for error messages.
const char* Name(const Message& message);

struct FrameHeader {
  uint16_t type = 0;
  bool has_fd = false;
  uint32_t body_bytes = 0;
};

// Returns the whole frame. The caller must keep the message within the bounds above.
std::string EncodeFrame(const Message& message, bool has_fd);

// Both take the peer's bytes. They return InvalidArgument, naming what was expected and what was
// there, for everything that EncodeFrame does not produce from a message within the bounds above.
// `bytes` must be kFrameHeaderBytes long, and `body` as long as its header says.
absl::StatusOr<FrameHeader> ParseFrameHeader(std::span<const std::byte> bytes);
absl::StatusOr<Message> ParseBody(uint16_t type, std::span<const std::byte> body);

}  // namespace thalweg::ipc
