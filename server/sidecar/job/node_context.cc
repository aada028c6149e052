#include "server/sidecar/job/node_context.h"

namespace thalweg {
namespace {

std::map<GradientPath, Gauge*> WorkersByPath(MetricRegistry& r) {
  std::map<GradientPath, Gauge*> gauges;
  for (const GradientPath path : kGradientPaths) {
    gauges[path] =
        &r.GetGauge("thalweg_sidecar_workers", "Workers connected, by the path of their gradients",
                    {{"path", Name(path)}});
  }
  return gauges;
}

std::array<Counter*, 4> WaitsByQuarter(MetricRegistry& r) {
  const auto of = [&r](const char* quarter) {
    return &r.GetCounter("thalweg_sidecar_weights_wait_seconds_total",
                         "Time for which nodes' first workers waited for weights that shards had "
                         "updated, by quarter of the model in the order of a forward pass",
                         {{"quarter", quarter}});
  };
  return {of("1"), of("2"), of("3"), of("4")};
}

Histogram& Phase(MetricRegistry& r, const std::string& phase) {
  return r.GetHistogram(
      "thalweg_sidecar_phase_seconds",
      "Time of a bucket's round in a phase; phases overlap: wait (for the node's own workers, what "
      "they copy included), reduce (folding and encoding, by all threads together), wire (from the "
      "first chunk sent to the last result), decode (by all threads together)",
      {{"phase", phase}});
}

}  // namespace

SidecarMetrics::SidecarMetrics(MetricRegistry& r)
    : registry(r),
      jobs(r.GetGauge("thalweg_sidecar_jobs", "Jobs with workers on this node")),
      workers(WorkersByPath(r)),
      jobs_ended(r, "thalweg_sidecar_jobs_ended_total",
                 "Jobs that have ended, by outcome: ok, or why they failed"),
      taken_up_jobs(r.GetCounter("thalweg_sidecar_taken_up_jobs_total",
                                 "Jobs of an earlier process of the sidecar that have gone on "
                                 "here")),
      steps(r.GetCounter("thalweg_sidecar_steps_total",
                         "Rounds of jobs' first bucket completed: steps that exchange gradients")),
      exchange_seconds(r.GetCounter("thalweg_sidecar_exchange_seconds_total",
                                    "Time in which a job had a bucket under way, also while it "
                                    "computed others")),
      buckets(r.GetCounter("thalweg_sidecar_buckets_total", "Bucket rounds completed")),
      collectives(r.GetCounter("thalweg_sidecar_collectives_total",
                               "Collectives that the node took part in, and messages that its "
                               "workers received from others, completed")),
      bucket_seconds(r.GetHistogram("thalweg_sidecar_bucket_seconds",
                                    "Time from the last worker's submission of a bucket to its "
                                    "result")),
      wait(Phase(r, "wait")),
      reduce(Phase(r, "reduce")),
      wire(Phase(r, "wire")),
      decode(Phase(r, "decode")),
      nonfinite(r.GetCounter("thalweg_sidecar_nonfinite_elements_total",
                             "NaN and infinite values among the results")),
      nonfinite_buckets(r.GetCounter("thalweg_sidecar_nonfinite_buckets_total",
                                     "Bucket rounds whose result has NaN or infinite values")),
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
                               "Norm of what compression has left out so far; sampled")),
      loss_scale(
          r.GetGauge("thalweg_sidecar_loss_scale",
                     "Loss scale of mixed precision of the latest backward pass; 1: its loss "
                     "was not scaled; 0: there was none")),
      skipped_steps(r.GetCounter("thalweg_sidecar_skipped_steps_total",
                                 "Steps that loss scalers have skipped because gradients were not "
                                 "finite, of all jobs")),
      weights_wait(WaitsByQuarter(r)) {}

}  // namespace thalweg
