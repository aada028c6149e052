// NodeContext has what all jobs of a sidecar share.
#pragma once

#include <array>
#include <cstdint>
#include <map>

#include "core/base/gradient_path.h"
#include "core/base/trace.h"
#include "server/base/metrics.h"
#include "server/base/outcome_counters.h"
#include "server/sidecar/device/device.h"
#include "server/sidecar/job/shard_directory.h"

namespace thalweg {

// SidecarMetrics are the metrics of a sidecar; references into a MetricRegistry.
struct SidecarMetrics {
  explicit SidecarMetrics(MetricRegistry& registry);

  Gauge& Workers(GradientPath path) const { return *workers.at(path); }

  MetricRegistry& registry;  // for metrics with a codec label
  Gauge& jobs;
  // connected workers; all paths have an entry, also unused ones
  std::map<GradientPath, Gauge*> workers;
  OutcomeCounters jobs_ended;
  Counter& taken_up_jobs;
  Counter& steps;
  Counter& exchange_seconds;
  Counter& buckets;
  Counter& collectives;
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
  std::array<Counter*, 4> weights_wait;  // by quarter of the model
};

// A NodeJob uses these objects; all must outlive it.
struct NodeContext {
  ShardDirectory& shards;
  Device& device;          // for gradients in host memory
  Device* gpus = nullptr;  // for gradients that workers share on GPUs; null: there is none
  SidecarMetrics& metrics;
  uint32_t threads = 1;          // folding threads per job
  uint32_t window_chunks = 0;    // requested from the shards; 0: they choose
  TraceWriter* trace = nullptr;  // nothing is traced when null
};

}  // namespace thalweg
