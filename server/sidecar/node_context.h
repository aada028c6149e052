// What all jobs of a sidecar share.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "core/base/exchange.h"
#include "core/base/gradient_path.h"
#include "core/base/metrics.h"
#include "core/base/outcome_counters.h"
#include "core/base/trace.h"
#include "server/sidecar/device/device.h"

namespace thalweg {

// Metrics of a sidecar; references into a MetricRegistry.
struct SidecarMetrics {
  explicit SidecarMetrics(MetricRegistry& registry);

  Gauge& Workers(GradientPath path) const { return *workers.at(path); }

  MetricRegistry& registry;  // for those with a codec label
  Gauge& jobs;
  std::map<GradientPath, Gauge*> workers;  // connected; all paths, also those that nobody takes
  OutcomeCounters jobs_ended;
  Counter& steps;
  Counter& exchange_seconds;
  Counter& buckets;
  Histogram& bucket_seconds;
  Histogram& wait;
  Histogram& reduce;
  Histogram& wire;
  Histogram& decode;
  Counter& nonfinite;
  Counter& nonfinite_buckets;
  Counter& compressed_buckets;
  Counter& given_up_buckets;
  Gauge& compressed_since;
  Gauge& compression_error;
  Gauge& residual_norm;
  Gauge& loss_scale;
  Counter& skipped_steps;
};

// What a NodeJob works with; all must outlive it.
struct NodeContext {
  std::vector<Shard*> shards;
  Device& device;          // for gradients in host memory
  Device* gpus = nullptr;  // for those that workers share on GPUs; null: there is none
  SidecarMetrics& metrics;
  uint32_t threads = 1;          // that fold, per job
  uint32_t window_chunks = 0;    // to ask the shards for; 0: they choose
  TraceWriter* trace = nullptr;  // null: nothing is traced
};

}  // namespace thalweg
