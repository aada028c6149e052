#include "server/aggregator/shard_metrics.h"

#include <algorithm>
#include <bit>
#include <string>

#include "absl/strings/str_cat.h"

namespace thalweg {
namespace {

Histogram& Phase(MetricRegistry& r, const std::string& phase) {
  return r.GetHistogram(
      "thalweg_shard_phase_seconds",
      "Time of a chunk's round in a phase: wait_for_slowest (from its first "
      "contribution to its last), fold (summing and encoding the mean), update (the step of an "
      "optimizer on it)",
      {{"phase", phase}});
}

Counter& OfNode(MetricRegistry& registry, const char* name, const char* help, uint32_t node) {
  constexpr uint32_t kNamed = ShardMetrics::kNamedNodes;
  return registry.GetCounter(name,
                             absl::StrCat(help, "; nodes from ", kNamed, " on are one, 'other'"),
                             {{"node", node < kNamed ? absl::StrCat(node) : "other"}});
}

}  // namespace

ShardMetrics::ShardMetrics(MetricRegistry& r)
    : registry(r),
      jobs(r.GetGauge("thalweg_shard_jobs", "Jobs that have members on this shard")),
      nodes(r.GetGauge("thalweg_shard_nodes", "Members of all jobs on this shard")),
      held_bytes(r.GetGauge("thalweg_shard_held_bytes",
                            "Payload bytes held for rounds that wait for more contributions")),
      held_limit_bytes(r.GetGauge("thalweg_shard_held_limit_bytes",
                                  "Most that the jobs' windows let thalweg_shard_held_bytes be")),
      residual_bytes(r.GetGauge("thalweg_shard_residual_bytes",
                                "Memory for what is kept of chunks: what encoding results has left "
                                "out so far, and weights")),
      memory_budget_bytes(r.GetGauge("thalweg_shard_memory_budget_bytes",
                                     "Memory that the shard's jobs may reserve together")),
      memory_reserved_bytes(r.GetGauge("thalweg_shard_memory_reserved_bytes",
                                       "Memory that jobs have reserved for windows, results, "
                                       "layouts and residuals")),
      contributions(r.GetCounter("thalweg_shard_contributions_total", "Contributions received")),
      duplicates(r.GetCounter("thalweg_shard_repeated_contributions_total",
                              "Contributions that came again and were not summed")),
      resumed_jobs(r.GetCounter("thalweg_shard_resumed_jobs_total",
                                "Jobs that nodes have resumed after this shard was restarted")),
      supplied_results(r.GetCounter("thalweg_shard_supplied_results_total",
                                    "Results of resumed jobs that one node has supplied for the "
                                    "others")),
      lost_residuals(r.GetCounter("thalweg_shard_lost_residuals_total",
                                  "Chunks of resumed jobs whose residual began at zero again")),
      lost_nodes(
          r.GetCounter("thalweg_shard_lost_nodes_total", "Nodes without which jobs have gone on")),
      rounds(r, "thalweg_shard_rounds_total",
             "Chunk rounds by outcome: ok, or why the job failed while they were open"),
      jobs_ended(r, "thalweg_shard_jobs_ended_total",
                 "Jobs that have ended, by outcome: ok, or why they failed"),
      bytes_in(r.GetCounter("thalweg_shard_received_bytes_total",
                            "Payload bytes of contributions received")),
      bytes_out(r.GetCounter("thalweg_shard_sent_bytes_total",
                             "Payload bytes of results handed to nodes")),
      raw_bytes_in(r.GetCounter("thalweg_shard_received_raw_bytes_total",
                                "Gradient bytes that the contributions received stand for")),
      raw_bytes_out(r.GetCounter("thalweg_shard_sent_raw_bytes_total",
                                 "Gradient bytes that the results handed to nodes stand for")),
      nonfinite(r.GetCounter("thalweg_shard_nonfinite_elements_total",
                             "NaN and infinite values among the results")),
      nonfinite_rounds(r.GetCounter("thalweg_shard_nonfinite_rounds_total",
                                    "Chunk rounds whose result has NaN or infinite values")),
      wait_for_slowest(Phase(r, "wait_for_slowest")),
      fold(Phase(r, "fold")),
      update(Phase(r, "update")) {
  for (size_t i = 0; i < staleness_.size(); ++i) {
    const uint64_t first = i == 0 ? 0 : uint64_t{1} << (i - 1);
    const bool is_last = i + 1 == staleness_.size();
    const std::string upto = i < 2     ? ""
                             : is_last ? " or more"
                                       : absl::StrCat(" to ", 2 * first - 1);
    staleness_[i] = &r.GetCounter(
        "thalweg_shard_staleness_total",
        "Chunks whose nodes do not wait for all others, by staleness: how many updates the "
        "weights that the gradients were computed with lacked",
        {{"updates", absl::StrCat(first, upto)}});
  }
}

Counter& ShardMetrics::WaitedFor(uint32_t node) const {
  return OfNode(registry, "thalweg_shard_waited_for_seconds_total",
                "Time that chunk rounds waited for one node alone, by that node", node);
}

Counter& ShardMetrics::StaleUpdates(uint32_t node) const {
  return OfNode(
      registry, "thalweg_shard_stale_updates_total",
      "Sum of the staleness of chunks whose nodes do not wait for all others, by the node", node);
}

Counter& ShardMetrics::Late(uint32_t node) const {
  return OfNode(registry, "thalweg_shard_late_total",
                "Chunks that came when the update of a quorum of nodes was over, by the node",
                node);
}

std::vector<Counter*> ShardMetrics::ByNode(CounterOf counter, uint32_t num_nodes) const {
  std::vector<Counter*> counters;
  for (uint32_t node = 0; node < num_nodes; ++node) counters.push_back(&(this->*counter)(node));
  return counters;
}

void ShardMetrics::CountStaleness(uint64_t staleness) const {
  staleness_[std::min<size_t>(std::bit_width(staleness), staleness_.size() - 1)]->Add();
}

void ShardMetrics::Report(ShardReport* report) const {
  const auto whole = [](const auto& metric) { return static_cast<uint64_t>(metric.Value()); };
  report->contributions = whole(contributions);
  report->repeated_contributions = whole(duplicates);
  report->rounds_completed = static_cast<uint64_t>(rounds.Value(absl::StatusCode::kOk));
  report->nonfinite_elems = whole(nonfinite);
  report->held_bytes = whole(held_bytes);
  report->residual_bytes = whole(residual_bytes);
  report->fold_time = FromSeconds(fold.Sum());
  report->received = {raw_bytes_in.Value(), bytes_in.Value()};
  report->sent = {raw_bytes_out.Value(), bytes_out.Value()};
}

}  // namespace thalweg
