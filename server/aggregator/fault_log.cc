#include "server/aggregator/fault_log.h"

#include <spdlog/spdlog.h>

#include <utility>

#include "server/base/log.h"
#include "server/base/printable.h"

namespace thalweg {

void FaultLog::AddFailure(const std::string& job, const absl::Status& why, uint64_t rounds_lost,
                          TimePoint now) {
  if (log_limit_.Admits(now)) spdlog::error("{}", Text(why));
  Add({{job, why.code(), std::string(why.message()), false, rounds_lost, {}}, now});
}

void FaultLog::AddRefusal(const std::string& job, const absl::Status& why, TimePoint now) {
  Add({{job, why.code(), std::string(why.message()), true, 0, {}}, now});
}

void FaultLog::Add(Fault fault) {
  fault.report.job = Printable(fault.report.job, kMaxTextBytes);
  fault.report.message = Printable(fault.report.message, kMaxTextBytes);
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
