// SessionStats is what a session has counted and measured.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/base/gradient_path.h"

namespace thalweg {

// Values are sums since the session began; times are in seconds.
struct SessionStats {
  uint64_t rounds = 0;               // buckets reduced
  uint64_t raw_bytes = 0;            // gradient bytes that this worker submitted
  uint64_t wire_bytes_sent = 0;      // payload bytes that the node sent for those buckets
  uint64_t wire_bytes_received = 0;  // payload bytes that the node received
  uint64_t link_bytes_sent = 0;      // payload bytes that left the node: also its shard's results
  uint64_t nonfinite_elems = 0;      // NaN and infinite elements among the results
  double copy_seconds = 0;           // copying gradients into the arena, or queueing the copies
  double reduce_seconds = 0;         // node: folding and encoding
  double wait_seconds = 0;           // node: waiting for its own workers
  double wire_seconds = 0;           // node: from the first chunk sent to the last result decoded
  double decode_seconds = 0;         // node: decoding results, summed over threads
  double total_seconds = 0;          // worker: from Submit to completion
  uint64_t sidecar_returns = 0;      // times that the session has gone on with a new sidecar
  // The following members are current values of this node, not sums.
  uint32_t workers = 0;           // that the last result is the mean over
  uint64_t compressed_since = 0;  // first compressed iteration, from 1; 0: none yet
  double residual_norm = 0;       // norm of what compression has left for later
  double error_ratio = 0;         // residual_norm relative to the norm of what was to be sent
  double loss_scale = 0;          // last value from NotePrecision; 0: none yet
  uint64_t skipped_steps = 0;     // the sum of NotePrecision's values
  GradientPath path = GradientPath::kCpu;
  uint32_t num_shards = 0;  // of the job
  std::string placement;    // for people: how the nodes use the shards; empty on a single node
  // Nodes without which the job goes on, for people: "node 1 (host): why". A node is here at most
  // an interval of heartbeats later than in `workers`.
  std::vector<std::string> lost_nodes;
};

}  // namespace thalweg
