// JobPlaces bound what the jobs on a shard claim, before they are given anything for it.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "core/exchange/join.h"
#include "server/base/fair_quota.h"

namespace thalweg {

// A job takes memory, and room in reports, for itself and for each of the nodes and shards that it
// says it has. It is charged to the place of the node that joins it first. Thread-compatible.
class JobPlaces {
 public:
  // Returns ResourceExhausted if there is no room for the job.
  absl::Status Check(const JoinRequest& first) const;
  // Take requires Check; Return takes the same request.
  void Take(const JoinRequest& first);
  void Return(const JoinRequest& first);

 private:
  FairQuota jobs_{1024};
  FairQuota nodes_{16'384};
  FairQuota shards_{32'768};
};

}  // namespace thalweg
