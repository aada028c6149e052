#include "server/aggregator/fault_log.h"

#include <utility>

namespace thalweg {
namespace {

void Cut(std::string* text) {
  if (text->size() <= FaultLog::kMaxTextBytes) return;
  text->resize(FaultLog::kMaxTextBytes);
  *text += "…";
}

}  // namespace

void FaultLog::AddFailure(const std::string& job, const absl::Status& why, uint64_t rounds_lost,
                          TimePoint now) {
  Add({{job, why.code(), std::string(why.message()), false, rounds_lost, {}}, now});
}

void FaultLog::AddRefusal(const std::string& job, const absl::Status& why, TimePoint now) {
  Add({{job, why.code(), std::string(why.message()), true, 0, {}}, now});
}

void FaultLog::Add(Fault fault) {
  Cut(&fault.report.job);
  Cut(&fault.report.message);
  MutexLock lock(mutex_);
  ReasonReport& reason = reasons_[fault.report.code];
  reason.code = fault.report.code;
  ++(fault.report.refused ? reason.nodes_refused : reason.jobs_failed);
  reason.rounds_lost += fault.report.rounds_lost;
  faults_.push_front(std::move(fault));
  if (faults_.size() > kKept) faults_.pop_back();
}

void FaultLog::Report(TimePoint now, ShardReport* report) {
  MutexLock lock(mutex_);
  for (const auto& [code, reason] : reasons_) report->reasons.push_back(reason);
  for (const Fault& fault : faults_) {
    report->faults.push_back(fault.report);
    report->faults.back().ago = now - fault.when;
  }
}

}  // namespace thalweg
