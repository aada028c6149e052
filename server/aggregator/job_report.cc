// This file holds the parts of Job that count and report.
#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "server/aggregator/job.h"

namespace thalweg {

void Job::CountLocked(uint32_t node, const LayoutRegistry::Weight& weight, uint64_t bytes,
                      const RoundEngine::Added& added) {
  const bool repeated = added.verdict == RoundEngine::Verdict::kDuplicate ||
                        added.verdict == RoundEngine::Verdict::kStale;
  const auto wire_bytes = static_cast<double>(bytes);
  const double raw_bytes = bytes == 0 ? 0 : weight.raw_bytes;  // who pulls gives no gradient
  metrics_.contributions.Add();
  metrics_.bytes_in.Add(wire_bytes);
  metrics_.raw_bytes_in.Add(raw_bytes);
  if (repeated) metrics_.duplicates.Add();

  ++tally_.contributions;
  if (repeated) ++tally_.repeated_contributions;
  Volume& received = tally_.received[weight.kind];
  received.raw_bytes += raw_bytes;
  received.wire_bytes += wire_bytes;
  if (!added.completed || added.completed->is_lone) return;
  // Contributions are timed before they wait for the lock, so the last one may be the older one.
  const Duration open = std::max(Duration::zero(), added.completed->open);
  const Duration alone = std::max(Duration::zero(), added.completed->missing_one);
  metrics_.wait_for_slowest.Observe(ToSeconds(open));
  waited_for_[node]->Add(ToSeconds(alone));
  if (spec_.num_nodes == 1) return;
  tally_.wait_time += open;
  Peer& last = peers_[node];
  ++last.last_rounds;
  last.waited += alone;
}

JobReport Job::Report(TimePoint now) {
  JobReport report;
  report.name = spec_.job;
  report.identity = absl::BytesToHexString(spec_.identity);
  report.age = now - began_;
  report.codec = spec_.codec.ToString();
  report.world_size = spec_.world_size;
  report.shard = spec_.shard;
  report.num_shards = spec_.num_shards;
  report.round_timeout = spec_.round_timeout;
  delivery_.Report(&report);
  // allocate before taking the lock, which contributions need
  report.nodes.reserve(spec_.num_nodes);
  std::vector<std::shared_ptr<ServedNode>> sinks;  // by node
  sinks.reserve(spec_.num_nodes);

  {
    MutexLock lock(mutex_);
    ReportRoundsLocked(now, &report);
    for (size_t i = 0; i < peers_.size(); ++i) {
      const Members::Node& member = members_.all()[i];
      NodeReport& node = report.nodes.emplace_back();
      sinks.push_back(peers_[i].sink);
      if (member.state == Members::State::kAwaited) continue;
      const bool is_active = member.state == Members::State::kPresent;
      node.name = member.host;
      node.state = is_active ? NodeReport::State::kActive : NodeReport::State::kLeft;
      node.workers = member.workers;
      node.silent = std::max(Duration::zero(), now - member.last_heard);
      node.last_rounds = peers_[i].last_rounds;
      node.waited = peers_[i].waited;
    }
  }
  for (size_t i = 0; i < sinks.size(); ++i) {
    if (sinks[i] != nullptr) report.nodes[i].reconnections = sinks[i]->Reconnections();
  }
  if (auto& placement = report.placement) {
    placement->text = Describe({placement->shares, placement->forecast});
  }
  return report;
}

void Job::ReportRoundsLocked(TimePoint now, JobReport* report) const {
  if (!failure_.ok()) {
    report->state = JobReport::State::kFailed;
    report->failure = std::string(failure_.message());
  } else if (members_.IsComplete()) {
    report->state = JobReport::State::kRunning;
  }
  report->chunk_bytes = plan_.flow().chunk_bytes;
  report->window_chunks = plan_.flow().window_chunks;
  report->link = plan_.slowest();
  const auto& [shares, forecast] = plan_.shares();
  if (!shares.empty()) report->placement = {shares, forecast, ""};
  report->contributions = tally_.contributions;
  report->repeated_contributions = tally_.repeated_contributions;
  report->rounds_lost = tally_.rounds_lost;
  report->open_rounds = engine_.open_rounds();
  report->held_bytes = engine_.held_bytes() + quorum_.held_bytes();
  report->residual_bytes = chunks_.bytes();
  report->memory_reserved_bytes = memory_.reserved_bytes();
  report->wait_time = tally_.wait_time;
  for (const auto& [kind, volume] : tally_.received) {
    report->formats.push_back({kind.wire, kind.factors, volume});
    report->received.raw_bytes += volume.raw_bytes;
    report->received.wire_bytes += volume.wire_bytes;
  }
  auto oldest = engine_.Oldest();
  auto other = quorum_.Oldest();
  if (other && (!oldest || other->opened < oldest->opened)) oldest = std::move(other);
  if (oldest) {
    report->waiting = {oldest->id, now - oldest->opened, std::move(oldest->missing)};
  }
}

}  // namespace thalweg
