// Versions and bounds that both ends of a connection must know.
#pragma once

#include <cstdint>

namespace thalweg {

// Sidecar ↔ aggregator (proto/thalweg/v1). A peer of another major version is refused at Join.
inline constexpr uint32_t kWireVersion = 1;
// Worker ↔ sidecar (core/ipc). Both come from the same installation, so they must be equal.
inline constexpr uint32_t kIpcVersion = 6;

// Bounds of what a job may ask for; within them a shard chooses (server/round/flow_plan.h).
inline constexpr uint64_t kMinChunkBytes = 4 << 10;
inline constexpr uint64_t kMaxChunkBytes = 4 << 20;
inline constexpr uint32_t kMaxWindowChunks = 1024;
// Of an aggregator, see Membership.
inline constexpr uint32_t kMaxWeight = 1000;

}  // namespace thalweg
