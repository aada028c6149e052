// What all jobs of a sidecar share.
#pragma once

#include <cstdint>
#include <vector>

#include "core/base/exchange.h"
#include "core/base/metrics.h"
#include "server/sidecar/device/device.h"

namespace thalweg {

// Metrics of a sidecar; references into a MetricRegistry.
struct SidecarMetrics {
  explicit SidecarMetrics(MetricRegistry& registry);

  MetricRegistry& registry;  // for those with a codec label
  Gauge& jobs;
  Gauge& workers;
  Counter& buckets;
  Counter& jobs_failed;
  Counter& nonfinite;
  Counter& wait_seconds;
  Counter& reduce_seconds;
  Counter& wire_seconds;
  Counter& decode_seconds;
  Counter& compressed_buckets;
  Counter& given_up_buckets;
  Gauge& compressed_since;
  Gauge& compression_error;
  Gauge& residual_norm;
};

// What a NodeJob works with; all must outlive it.
struct NodeContext {
  std::vector<Shard*> shards;
  Device& device;
  SidecarMetrics& metrics;
  uint32_t threads = 1;        // that fold, per job
  uint32_t window_chunks = 0;  // to ask the shards for; 0: they choose
};

}  // namespace thalweg
