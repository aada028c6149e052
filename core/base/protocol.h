// This header holds versions and limits that both ends of a connection must know.
#pragma once

#include <cstddef>
#include <cstdint>

namespace thalweg {

// kWireVersion is for sidecar ↔ aggregator (proto/thalweg/v1). A peer of another major version is
// refused at Join.
inline constexpr uint32_t kWireVersion = 7;
// kIpcVersion is for worker ↔ sidecar (core/ipc). Both come from the same installation, so the
// versions must be equal.
inline constexpr uint32_t kIpcVersion = 22;

// A job's settings must be within these limits; within them a shard chooses
// (server/plan/flow_plan.h).
inline constexpr uint64_t kMinChunkBytes = 4 << 10;
inline constexpr uint64_t kMaxChunkBytes = 4 << 20;
inline constexpr uint32_t kMaxWindowChunks = 1024;
// A job has at most this many shards.
inline constexpr uint32_t kMaxShards = 8192;
// Names of jobs, nodes and tensors, and addresses, have at most this length.
inline constexpr size_t kMaxNameBytes = 512;
// A bucket, or a part of one, has at most this many tensors, padding included.
inline constexpr uint32_t kMaxBucketTensors = 1 << 18;
// A node that resumes a job on a shard tells it the rounds of at most this many chunks.
inline constexpr size_t kMaxResumedChunks = 1 << 17;
// The reason of a failure is cut to this length. gRPC sends it as HTTP/2 metadata, of which a
// receiver accepts 8 KiB; bytes outside plain ASCII take three each.
inline constexpr size_t kMaxReasonBytes = 2000;
// The largest weight of an aggregator; see Terms.
inline constexpr uint32_t kMaxWeight = 1000;

}  // namespace thalweg
