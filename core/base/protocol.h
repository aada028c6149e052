// This header holds versions and limits that both ends of a connection must know.
#pragma once

#include <cstdint>

namespace thalweg {

// kWireVersion is for sidecar ↔ aggregator (proto/thalweg/v1). A peer of another major version is
// refused at Join.
inline constexpr uint32_t kWireVersion = 1;
// kIpcVersion is for worker ↔ sidecar (core/ipc). Both come from the same installation, so the
// versions must be equal.
inline constexpr uint32_t kIpcVersion = 7;

// A job's settings must be within these limits; within them a shard chooses
// (server/round/flow_plan.h).
inline constexpr uint64_t kMinChunkBytes = 4 << 10;
inline constexpr uint64_t kMaxChunkBytes = 4 << 20;
inline constexpr uint32_t kMaxWindowChunks = 1024;
// A job has at most this many shards.
inline constexpr uint32_t kMaxShards = 8192;
// The largest weight of an aggregator; see Membership.
inline constexpr uint32_t kMaxWeight = 1000;

}  // namespace thalweg
