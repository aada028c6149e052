// What compression has come to in a job on this node: the state that outlives a bucket's layout,
// what auto chooses, and what users are told.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "core/base/codec_policy.h"
#include "core/base/exchange.h"
#include "core/ipc/message.h"
#include "server/sidecar/codec/auto_codec.h"
#include "server/sidecar/codec/parameter_states.h"
#include "server/sidecar/node_bucket.h"
#include "server/sidecar/node_context.h"

namespace thalweg {

// Not thread-safe: the job's mutex guards it.
class JobCompression {
 public:
  // `metrics` must outlive it.
  JobCompression(std::string job, const CodecPolicy& policy, uint32_t num_nodes,
                 uint32_t num_shards, SidecarMetrics& metrics);

  // What auto chooses from; empty unless it is to choose.
  const std::vector<CodecSpec>& candidates() const { return terms_.candidates; }
  // What the nodes know of each other, once they have joined.
  void Agree(const Membership& agreed);
  // The number, among the policy's codecs, of what auto takes for a bucket. Says why.
  uint32_t Choose(BucketId id, const BucketLayout& layout);

  ParameterStates& states() { return states_; }

  // A round of a compressed bucket is over; its codecs are at rest, others' need not be.
  void Count(const NodeBucket& bucket);
  // Fills in what workers are told of it.
  void Describe(Complete& message) const;

 private:
  void ShowChoices();

  const std::string job_;
  const CodecPolicy policy_;
  SidecarMetrics& metrics_;
  AutoTerms terms_;  // without candidates unless auto is to choose
  ParameterStates states_;
  std::map<uint32_t, Choice> choices_;        // of auto, by bucket index
  uint64_t compressed_since_ = 0;             // the iteration; 0: not yet
  std::map<uint32_t, CompressionLoss> loss_;  // by bucket index
};

}  // namespace thalweg
