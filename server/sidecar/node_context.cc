#include "server/sidecar/node_context.h"

namespace thalweg {

SidecarMetrics::SidecarMetrics(MetricRegistry& r)
    : registry(r),
      jobs(r.GetGauge("thalweg_sidecar_jobs", "Jobs with workers on this node")),
      workers(r.GetGauge("thalweg_sidecar_workers", "Workers connected")),
      buckets(r.GetCounter("thalweg_sidecar_buckets_total", "Bucket rounds completed")),
      jobs_failed(r.GetCounter("thalweg_sidecar_jobs_failed_total", "Jobs that failed")),
      nonfinite(r.GetCounter("thalweg_sidecar_nonfinite_elements_total",
                             "NaN and infinite values among the results")),
      wait_seconds(r.GetCounter("thalweg_sidecar_wait_seconds_total",
                                "Time that buckets waited for the node's own workers")),
      reduce_seconds(r.GetCounter("thalweg_sidecar_reduce_seconds_total",
                                  "Time spent folding and encoding the workers' shares")),
      wire_seconds(r.GetCounter("thalweg_sidecar_wire_seconds_total",
                                "Time from a bucket's first chunk sent to its last result")),
      decode_seconds(r.GetCounter("thalweg_sidecar_decode_seconds_total",
                                  "Time spent decoding results, by all threads together")),
      compressed_buckets(r.GetCounter("thalweg_sidecar_compressed_buckets_total",
                                      "Bucket rounds that crossed the network compressed")),
      given_up_buckets(r.GetCounter("thalweg_sidecar_given_up_buckets_total",
                                    "Bucket rounds sent whole because a factor was not finite")),
      compressed_since(r.GetGauge("thalweg_sidecar_compression_start_iteration",
                                  "Iteration, from 1, in which compression began; 0: not yet")),
      compression_error(r.GetGauge("thalweg_sidecar_compression_error_ratio",
                                   "Norm of what compression left out, over the norm of what was "
                                   "to be sent; sampled")),
      residual_norm(r.GetGauge("thalweg_sidecar_residual_norm",
                               "Norm of what compression has left out so far; sampled")) {}

}  // namespace thalweg
