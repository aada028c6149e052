// ShardMetrics holds the metrics of a shard.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "core/exchange/shard_report.h"
#include "server/base/metrics.h"
#include "server/base/outcome_counters.h"

namespace thalweg {

// The members are references into a MetricRegistry.
struct ShardMetrics {
  explicit ShardMetrics(MetricRegistry& registry);

  // Fills in the sums over all jobs.
  void Report(ShardReport* report) const;

  // Returns the time that rounds have waited for node `node` alone. Nodes from kNamedNodes on share
  // one counter.
  Counter& WaitedFor(uint32_t node) const;
  static constexpr uint32_t kNamedNodes = 64;
  // Returns the sum of the staleness of what this node has contributed; named in the same way.
  Counter& StaleUpdates(uint32_t node) const;
  // Returns how many chunks of this node have come when a quorum's update was over; named likewise.
  Counter& Late(uint32_t node) const;
  // Returns one of these for each of the first nodes.
  using CounterOf = Counter& (ShardMetrics::*)(uint32_t node) const;
  std::vector<Counter*> ByNode(CounterOf counter, uint32_t num_nodes) const;
  // Counts a contribution, of a chunk, of this staleness.
  void CountStaleness(uint64_t staleness) const;

  MetricRegistry& registry;
  Gauge& jobs;
  Gauge& nodes;
  Gauge& held_bytes;
  Gauge& held_limit_bytes;
  Gauge& residual_bytes;
  Gauge& memory_budget_bytes;
  Gauge& memory_reserved_bytes;
  Counter& contributions;
  Counter& duplicates;
  Counter& resumed_jobs;
  Counter& supplied_results;
  Counter& lost_residuals;
  Counter& lost_nodes;
  OutcomeCounters rounds;
  OutcomeCounters jobs_ended;
  Counter& bytes_in;
  Counter& bytes_out;
  Counter& raw_bytes_in;
  Counter& raw_bytes_out;
  Counter& nonfinite;
  Counter& nonfinite_rounds;
  Histogram& wait_for_slowest;
  Histogram& fold;
  Histogram& update;

 private:
  std::array<Counter*, 8> staleness_;  // 0, 1, 2 to 3, 4 to 7 …
};

}  // namespace thalweg
