// EndedJobs remembers for a while why jobs have failed, when nothing else of them is left: a node
// that has been restarted meanwhile, and would resume such a job, must not wait for the others.
#pragma once

#include <chrono>
#include <cstddef>
#include <map>

#include "absl/status/status.h"
#include "core/base/clock.h"
#include "server/aggregator/job_id.h"

namespace thalweg {

// An EndedJobs is thread-compatible.
class EndedJobs {
 public:
  static constexpr Duration kKept = std::chrono::minutes(2);
  static constexpr size_t kMost = 256;  // of several it forgets the one that ended first

  // The job has begun, and failed with `why`, or OK: then it has not failed.
  void Note(const JobId& id, const absl::Status& why, TimePoint now);
  // Returns why the job is over, as Aborted; OK: nothing is known of it.
  absl::Status Check(const JobId& id, TimePoint now) const;
  // Another job with that id begins.
  void Forget(const JobId& id) { ends_.erase(id); }

 private:
  struct End {
    absl::Status why;
    TimePoint at;
  };

  std::map<JobId, End> ends_;
};

}  // namespace thalweg
