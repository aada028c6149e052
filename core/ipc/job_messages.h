// Messages about a job as a whole: who its workers are, and that it goes on or ends. message.h says
// how they are written.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "core/base/codec_policy.h"
#include "core/base/gradient_path.h"
#include "core/base/protocol.h"
#include "core/base/shard_place.h"
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

// Alive is a sign of life: a worker sends it all the time, the sidecar while workers wait for it.
struct Alive {
  bool operator==(const Alive&) const = default;
};

// Lost is the sidecar's message that the job goes on without a node; both texts are for people.
struct Lost {
  std::string node;
  std::string why;
  bool operator==(const Lost&) const = default;
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

}  // namespace thalweg::ipc
