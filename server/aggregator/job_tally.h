// JobTally counts what a job's nodes contribute, for the job's report and the shard's metrics.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "core/base/clock.h"
#include "core/exchange/shard_report.h"
#include "server/aggregator/shard_metrics.h"
#include "server/round/job_rounds.h"
#include "server/round/layout_registry.h"

namespace thalweg {

// Thread-compatible.
class JobTally {
 public:
  // `metrics` must outlive it.
  JobTally(uint32_t num_nodes, ShardMetrics& metrics);

  // Counts a contribution that is `counted`, and what follows from it.
  void Count(uint32_t node, const JobRounds::Held& held);
  // The job fails for this reason while so many rounds are open.
  void CountFailure(absl::StatusCode code, uint64_t open_rounds);

  // Fill in what has been counted, and what concerns one node.
  void Report(JobReport* report) const;
  void Report(uint32_t node, NodeReport* report) const;

 private:
  // See NodeReport.
  struct Waited {
    uint64_t last_rounds = 0;
    Duration time{};
  };

  ShardMetrics& metrics_;
  const std::vector<Counter*> waited_for_;  // by node, as are the next two
  const std::vector<Counter*> late_;
  std::vector<Waited> waited_;
  uint64_t contributions_ = 0;
  uint64_t repeated_contributions_ = 0;
  uint64_t rounds_lost_ = 0;
  Duration wait_time_{};
  std::map<LayoutRegistry::Kind, Volume> received_;
};

}  // namespace thalweg
