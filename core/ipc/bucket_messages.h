// Messages about buckets and their rounds, and what another process of the sidecar needs of them.
// message.h says how they are written.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "core/base/layout.h"
#include "core/base/update.h"
#include "core/ipc/device_memory.h"

namespace thalweg::ipc {

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

}  // namespace thalweg::ipc
