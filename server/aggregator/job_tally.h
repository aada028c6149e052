// JobTally counts a job's events for its report, beside its shard's metrics.
#pragma once

#include <map>

#include "core/exchange/shard_report.h"
#include "server/round/layout_registry.h"

namespace thalweg {

// A JobTally is written under the job's mutex.
struct JobTally {
  uint64_t contributions = 0;
  uint64_t repeated_contributions = 0;
  uint64_t rounds_lost = 0;
  Duration wait_time{};
  std::map<LayoutRegistry::Kind, Volume> received;
};

}  // namespace thalweg
