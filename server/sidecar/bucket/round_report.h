// A RoundReport counts a job's rounds in the metrics and describes them in the trace
// (docs/timeline.md).
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "core/base/clock.h"
#include "core/base/trace.h"
#include "core/ipc/message.h"
#include "server/sidecar/bucket/node_bucket.h"
#include "server/sidecar/job/node_context.h"

namespace thalweg {

// Thread-safe.
class RoundReport {
 public:
  // `job` is the Hello of one of its workers. The metrics, and `trace`, which may be null, must
  // outlive the report.
  RoundReport(const ipc::Hello& job, SidecarMetrics& metrics, TraceWriter* trace);

  // A round of the bucket is over, and `total` has passed since the last worker submitted it.
  void CountTimes(const ipc::Complete& message, Duration total) const;
  // Says in the log when results are means over fewer workers than before, or than the job has.
  void NoteWorkers(uint32_t workers);
  // Requires that all codecs of the round have their results, and that it has not ended yet. Rounds
  // that take no gradient, or give no result to workers (UpdateRound), have bytes of neither.
  void CountRound(NodeBucket& bucket) const;
  // The node's first worker has waited for weights of that quarter of the model.
  void CountWeightsWait(size_t quarter, Duration waited) const;
  // The job had rounds in flight for that long without a break.
  void CountExchange(Duration time) const;

  const JobTrace& trace() const { return trace_; }  // false when nothing is traced
  // For the trace: a bucket; a codec's tensors in it; a chunk of a part.
  TraceSubject Describe(const NodeBucket& bucket) const;
  TraceSubject Describe(const NodeBucket& bucket, const BucketCodec& codec) const;
  TraceSubject Describe(const NodeBucket& bucket, const BucketCodec& codec, const Part& part,
                        uint32_t chunk, uint64_t wire_bytes) const;

 private:
  const std::string job_;
  const uint32_t world_size_;
  std::atomic<uint32_t> workers_;  // that the last results are means over
  const std::string codec_;
  const bool is_alone_;
  SidecarMetrics& metrics_;
  const JobTrace trace_;
};

}  // namespace thalweg
