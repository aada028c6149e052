// JobPlan gathers what the nodes of a job have measured, and chooses its chunks, windows and
// shares.
#pragma once

#include <cstdint>
#include <vector>

#include "core/exchange/join.h"
#include "server/plan/flow_plan.h"
#include "server/plan/link_rates.h"
#include "server/plan/share_plan.h"

namespace thalweg {

// A JobPlan is thread-compatible.
class JobPlan {
 public:
  // `first` is the request of the node that came first, and must outlive the plan.
  JobPlan(const JoinRequest& first, uint32_t max_window_chunks);

  // Takes what a new member has measured.
  void Learn(const JoinRequest& request);
  // Chooses, once all nodes have joined. The first shard chooses the shares for all; the nodes tell
  // the others.
  void Choose();
  // Goes on with what has been chosen before, in another process.
  void Keep(uint64_t chunk_bytes, const std::vector<uint32_t>& shares);

  uint32_t max_window_chunks() const { return max_window_chunks_; }
  const LinkSpeed& slowest() const { return slowest_; }  // of all links known so far
  // These are empty until Choose.
  const FlowPlan& flow() const { return flow_; }
  const SharePlan& shares() const { return shares_; }
  // Returns how large a result may be, in bytes.
  uint64_t MostBytesOfResult() const;
  // Returns what nodes are told, without what differs by node and the shard's weight.
  Terms TermsOf(uint64_t epoch) const;

 private:
  const JoinRequest& first_;
  const uint32_t max_window_chunks_;
  LinkSpeed slowest_;
  std::vector<CodecCost> costs_;  // the largest known so far
  LinkRates rates_;
  FlowPlan flow_;
  SharePlan shares_;
};

}  // namespace thalweg
