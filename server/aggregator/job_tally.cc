#include "server/aggregator/job_tally.h"

#include <algorithm>

namespace thalweg {

JobTally::JobTally(uint32_t num_nodes, ShardMetrics& metrics)
    : metrics_(metrics),
      waited_for_(metrics.ByNode(&ShardMetrics::WaitedFor, num_nodes)),
      late_(metrics.ByNode(&ShardMetrics::Late, num_nodes)),
      waited_(num_nodes) {}

void JobTally::Count(uint32_t node, const JobRounds::Held& held) {
  const auto& [weight, bytes, verdict, late] = *held.counted;
  const bool repeated =
      verdict == RoundEngine::Verdict::kDuplicate || verdict == RoundEngine::Verdict::kStale;
  const auto wire_bytes = static_cast<double>(bytes);
  const double raw_bytes = bytes == 0 ? 0 : weight.raw_bytes;  // who pulls gives no gradient
  metrics_.contributions.Add();
  metrics_.bytes_in.Add(wire_bytes);
  metrics_.raw_bytes_in.Add(raw_bytes);
  if (repeated) metrics_.duplicates.Add();
  if (late && late->updates > 0) late_[node]->Add();

  ++contributions_;
  if (repeated) ++repeated_contributions_;
  Volume& received = received_[weight.kind];
  received.raw_bytes += raw_bytes;
  received.wire_bytes += wire_bytes;
  if (!held.completed || held.completed->round.is_lone) return;
  const CompleteRound& round = held.completed->round;
  // Contributions are timed before they wait for the lock, so the last one may be the older one.
  const Duration open = std::max(Duration::zero(), round.open);
  const Duration alone = std::max(Duration::zero(), round.missing_one);
  metrics_.wait_for_slowest.Observe(ToSeconds(open));
  waited_for_[node]->Add(ToSeconds(alone));
  if (waited_.size() == 1) return;
  wait_time_ += open;
  ++waited_[node].last_rounds;
  waited_[node].time += alone;
}

void JobTally::CountFailure(absl::StatusCode code, uint64_t open_rounds) {
  metrics_.jobs_ended.Add(code);
  metrics_.rounds.Add(code, static_cast<double>(open_rounds));
  rounds_lost_ = open_rounds;
}

void JobTally::Report(JobReport* report) const {
  report->contributions = contributions_;
  report->repeated_contributions = repeated_contributions_;
  report->rounds_lost = rounds_lost_;
  report->wait_time = wait_time_;
  for (const auto& [kind, volume] : received_) {
    report->formats.push_back({kind.wire, kind.factors, volume});
    report->received.raw_bytes += volume.raw_bytes;
    report->received.wire_bytes += volume.wire_bytes;
  }
}

void JobTally::Report(uint32_t node, NodeReport* report) const {
  report->last_rounds = waited_[node].last_rounds;
  report->waited = waited_[node].time;
}

}  // namespace thalweg
