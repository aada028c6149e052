// PlanFlow chooses the size of a job's chunks and how many of them a node may have in flight, from
// the speed of the links. It is a pure function.
#pragma once

#include <cstdint>

#include "core/base/exchange.h"

namespace thalweg {

struct FlowPlan {
  uint64_t chunk_bytes = 0;
  uint32_t window_chunks = 0;  // per node and shard
};

// Small chunks fill the pipeline sooner: a round ends about two chunks after the link has carried
// its last byte. Large chunks cost less work per byte. A chunk gets as many bytes as the slowest
// node's link carries in 4 ms, rounded to a power of two from 16 KiB to 1 MiB; without a network it
// gets a size that stays in a core's cache. The bytes are counted on the wire: under a wire type of
// half the size, chunk_bytes, which counts the gradient's bytes, is twice as much. The window
// covers 100 ms and two round trips of that link, divided among the shards, and at least 8 chunks:
// other nodes may be that late without leaving the link idle.
FlowPlan PlanFlow(const LinkSpeed& slowest, uint32_t num_shards, DType wire);

}  // namespace thalweg
