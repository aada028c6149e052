// What has gone wrong on a shard, for those who look later: jobs are forgotten when their nodes
// have left, their faults are not.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <string>

#include "absl/status/status.h"
#include "core/base/mutex.h"
#include "core/base/shard_report.h"

namespace thalweg {

// Thread-safe. Keeps the latest kKept faults, and how often each reason came.
class FaultLog {
 public:
  static constexpr size_t kKept = 50;
  static constexpr size_t kMaxTextBytes = 1024;  // of names and messages; longer ones are cut

  // Job `job` has failed, and with it the rounds that were open.
  void AddFailure(const std::string& job, const absl::Status& why, uint64_t rounds_lost,
                  TimePoint now);
  // A node was not admitted to `job`.
  void AddRefusal(const std::string& job, const absl::Status& why, TimePoint now);

  // Fills in reasons and faults.
  void Report(TimePoint now, ShardReport* report);

 private:
  struct Fault {
    FaultReport report;
    TimePoint when;
  };

  void Add(Fault fault);

  Mutex mutex_;
  std::deque<Fault> faults_ ABSL_GUARDED_BY(mutex_);  // the latest first
  std::map<absl::StatusCode, ReasonReport> reasons_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace thalweg
