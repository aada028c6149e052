// What a shard counts.
#pragma once

#include "core/base/metrics.h"

namespace thalweg {

// Metrics of a shard; references into a MetricRegistry.
struct ShardMetrics {
  explicit ShardMetrics(MetricRegistry& registry);

  Gauge& jobs;
  Gauge& held_bytes;
  Gauge& residual_bytes;
  Counter& contributions;
  Counter& duplicates;
  Counter& rounds_completed;
  Counter& jobs_failed;
  Counter& bytes_in;
  Counter& bytes_out;
  Counter& nonfinite;
  Counter& fold_seconds;
};

}  // namespace thalweg
