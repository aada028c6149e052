// A JobCompression decides for a job on this node what auto chooses, and tells users about it.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "core/base/codec_policy.h"
#include "core/base/mutex.h"
#include "core/exchange/join.h"
#include "core/ipc/message.h"
#include "server/sidecar/bucket/node_bucket.h"
#include "server/sidecar/codec/auto_codec.h"
#include "server/sidecar/job/node_context.h"

namespace thalweg {

// Thread-safe.
class JobCompression {
 public:
  // `metrics` must outlive it.
  JobCompression(std::string job, const CodecPolicy& policy, uint32_t num_nodes,
                 uint32_t num_shards, SidecarMetrics& metrics);
  ~JobCompression();  // what it shows of this job is gone

  // Returns the codecs that auto chooses from; empty unless it is to choose.
  const std::vector<CodecSpec>& candidates() const { return candidates_; }
  // Takes what the nodes know of each other once they have joined; `forecast` is that of the shares
  // in use.
  void Agree(const Terms& agreed, const ShareForecast& forecast);
  // Returns the numbers that were agreed on and by which auto chooses; empty unless it is to
  // choose.
  std::vector<double> measured() const;
  // Goes on after an earlier process, which had agreed on `measured`, and in which compression had
  // begun in that iteration (0: not yet). InvalidArgument: these are not a job's like this one.
  absl::Status Restore(const std::vector<double>& measured, uint64_t compressed_since);
  // The number, among the policy's codecs, of what auto takes for a bucket. Says why.
  uint32_t Choose(BucketId id, const BucketLayout& layout);

  // A round of a compressed bucket is over; its codecs are at rest, others' need not be.
  void Count(const NodeBucket& bucket);
  // Fills in what workers are told of it.
  void Describe(ipc::Complete& message);

 private:
  void ShowChoices() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Return the gauges of one of candidates().
  Gauge& PredictedSeconds(const CodecSpec& codec) const;
  Gauge& ChosenFor(const CodecSpec& codec) const;

  const std::string job_;
  const CodecPolicy policy_;
  SidecarMetrics& metrics_;
  const std::vector<CodecSpec> candidates_;

  mutable Mutex mutex_;
  AutoTerms terms_ ABSL_GUARDED_BY(mutex_);
  std::map<uint32_t, AutoChoice> choices_ ABSL_GUARDED_BY(mutex_);    // of auto, by bucket index
  uint64_t compressed_since_ ABSL_GUARDED_BY(mutex_) = 0;             // the iteration; 0: not yet
  std::map<uint32_t, CompressionLoss> loss_ ABSL_GUARDED_BY(mutex_);  // by bucket index
};

}  // namespace thalweg
