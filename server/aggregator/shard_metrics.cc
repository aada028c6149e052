#include "server/aggregator/shard_metrics.h"

namespace thalweg {

ShardMetrics::ShardMetrics(MetricRegistry& r)
    : jobs(r.GetGauge("thalweg_shard_jobs", "Jobs that have members on this shard")),
      held_bytes(r.GetGauge("thalweg_shard_held_bytes",
                            "Payload bytes held for rounds that wait for more contributions")),
      residual_bytes(r.GetGauge("thalweg_shard_residual_bytes",
                                "Memory for what encoding results has left out so far")),
      contributions(r.GetCounter("thalweg_shard_contributions_total", "Contributions received")),
      duplicates(r.GetCounter("thalweg_shard_repeated_contributions_total",
                              "Contributions that came again and were not summed")),
      rounds_completed(r.GetCounter("thalweg_shard_rounds_total", "Chunk rounds completed")),
      jobs_failed(r.GetCounter("thalweg_shard_jobs_failed_total", "Jobs that failed")),
      bytes_in(r.GetCounter("thalweg_shard_received_bytes_total",
                            "Payload bytes of contributions received")),
      bytes_out(r.GetCounter("thalweg_shard_sent_bytes_total",
                             "Payload bytes of results handed to nodes")),
      nonfinite(r.GetCounter("thalweg_shard_nonfinite_elements_total",
                             "NaN and infinite values among the results")),
      fold_seconds(r.GetCounter("thalweg_shard_fold_seconds_total", "Time spent summing")) {}

}  // namespace thalweg
