// How large the chunks of a job are and how many of them a node may have on their way, from what
// the links carry. Pure.
#pragma once

#include <cstdint>

#include "core/base/exchange.h"

namespace thalweg {

struct FlowPlan {
  uint64_t chunk_bytes = 0;
  uint32_t window_chunks = 0;  // per node and shard
};

// Small chunks fill the pipeline sooner: a round ends about two chunks after the link has carried
// its last byte. Large ones cost less work per byte. A chunk gets as much as the slowest node's
// link carries in 4 ms, in powers of two from 16 KiB to 1 MiB; without a network it gets what stays
// in a core's cache. That is counted on the wire: under a wire type of half the size, chunk_bytes,
// which counts the gradient's bytes, is twice as much. The window covers 100 ms and two round trips
// of that link, spread over the shards, and 8 chunks at least: time for the other nodes to be late
// without the link falling idle.
FlowPlan PlanFlow(const LinkSpeed& slowest, uint32_t num_shards, DType wire);

}  // namespace thalweg
