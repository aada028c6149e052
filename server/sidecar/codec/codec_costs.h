// MeasureCosts measures on this machine what auto needs to know about it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/base/codec_cost.h"
#include "core/base/codec_spec.h"

namespace thalweg {

// Returns the cost of each of `candidates` when `threads` work at it, on a node and on the shards
// of a job of `num_nodes`: it assumes that shards run on machines like this one. Takes some 15 ms
// on the caller's thread, twice as long on a busy machine. Requires candidates that are not auto,
// and num_nodes and threads of 1 or more. Thread-safe.
std::vector<CodecCost> MeasureCosts(std::span<const CodecSpec> candidates, uint32_t num_nodes,
                                    uint32_t threads);

}  // namespace thalweg
