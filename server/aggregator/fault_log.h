// FaultLog remembers what has gone wrong on a shard. A job is removed when its nodes have left; its
// faults stay.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <string>

#include "absl/status/status.h"
#include "core/base/mutex.h"
#include "core/exchange/shard_report.h"
#include "server/base/log_limit.h"

namespace thalweg {

// A FaultLog is thread-safe. It keeps the latest kKept faults and counts how often each reason
// occurred.
class FaultLog {
 public:
  static constexpr size_t kKept = 50;
  static constexpr size_t kMaxTextBytes = 1024;  // names and messages are cut to this (Printable)

  // Records that job `job` has failed, together with its open rounds, and logs it.
  void AddFailure(const std::string& job, const absl::Status& why, uint64_t rounds_lost,
                  TimePoint now);
  // Records that a node was not admitted to `job`.
  void AddRefusal(const std::string& job, const absl::Status& why, TimePoint now);

  // Fills in reasons and faults.
  void Report(TimePoint now, ShardReport* report);

 private:
  struct Fault {
    FaultReport report;
    TimePoint when;
  };

  void Add(Fault fault);

  LogLimit log_limit_{"about failed jobs"};
  Mutex mutex_;
  std::deque<Fault> faults_ ABSL_GUARDED_BY(mutex_);  // latest first
  std::map<absl::StatusCode, ReasonReport> reasons_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace thalweg
