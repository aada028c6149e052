// PlanFlow chooses the size of a job's chunks and how many of them a node may have in flight, from
// the speed of the links. It is a pure function.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/base/wire_format.h"
#include "core/exchange/link_speed.h"

namespace thalweg {

struct FlowPlan {
  uint64_t chunk_bytes = 0;
  uint32_t window_chunks = 0;  // per node, at the shard with the largest share
};

// `shares` are those of the job's shards, of which one at least is positive.
//
// Small chunks fill the pipeline sooner: a round ends about two chunks after the link has carried
// its last byte. Large chunks cost less work per byte. A chunk gets as many bytes as the slowest
// node's link carries in 4 ms, or less where many shards have a share, and less again where shares
// differ, rounded down to a power of two from 16 KiB to 1 MiB; without a network it gets a size
// that stays in a core's cache. The bytes are counted on the wire: under a wire type of half the
// size, chunk_bytes, which counts the gradient's bytes, is twice as much.
//
// All windows of a node together cover 40 ms and two round trips of that link, and each is in
// proportion to its shard's share: where links are shared by several shards' chunks, each shard
// then gets the part of them that its share needs. More in flight would not fit into the queues of
// switches; what they drop comes late, and whichever connection recovers first takes the link. On
// fast links, 40 ms are more than a processor's caches hold, so beyond 4 MiB only 2 ms are covered.
// The largest window has at least 6 chunks, and up to half as many more where the others, which are
// whole numbers, are then nearer to their proportion: a shard with too small a window is slower
// than its share, and holds the others up.
FlowPlan PlanFlow(const LinkSpeed& slowest, std::span<const uint32_t> shares, DType wire);

// Returns each shard's window, in proportion to its share, of which the largest gets `most` chunks.
// A shard gets kLeastWindow at least, so that one chunk can travel while it sums another.
std::vector<uint32_t> WindowsOf(std::span<const uint32_t> shares, uint32_t most);

}  // namespace thalweg
