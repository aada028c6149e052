// This file holds the parts of Job that report.
#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "server/aggregator/job.h"

namespace thalweg {

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
    for (size_t i = 0; i < sinks_.size(); ++i) {
      const Members::Node& member = members_.all()[i];
      NodeReport& node = report.nodes.emplace_back();
      sinks.push_back(sinks_[i]);
      if (member.state == Members::State::kAwaited) continue;
      const bool is_active = member.state == Members::State::kPresent;
      node.name = member.host;
      node.state = is_active ? NodeReport::State::kActive : NodeReport::State::kLeft;
      node.workers = member.workers;
      node.silent = std::max(Duration::zero(), now - member.last_heard);
      tally_.Report(static_cast<uint32_t>(i), &node);
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
  report->open_rounds = rounds_.open_rounds();
  report->held_bytes = rounds_.held_bytes();
  report->residual_bytes = rounds_.states().bytes();
  report->memory_reserved_bytes = memory_.reserved_bytes();
  tally_.Report(report);
  if (auto oldest = rounds_.Oldest()) {
    report->waiting = {oldest->id, now - oldest->opened, std::move(oldest->missing)};
  }
}

}  // namespace thalweg
