// A JobOutcome tells all parts of a job whether the job goes on.
#pragma once

#include <atomic>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "core/base/clock.h"
#include "core/base/mutex.h"

namespace thalweg {

// Thread-safe; calls nothing, so it may be asked under any lock.
class JobOutcome {
 public:
  explicit JobOutcome(std::string job) : job_(std::move(job)) {}

  // Fails the job. Returns false when it has failed or ended before: only the first failure counts,
  // since later ones are its consequences.
  bool Fail(const absl::Status& reason);
  // Ends the job: all workers have left, or the sidecar stops. A failure from before remains.
  void End();

  // Returns OK while the job goes on; afterwards the failure, or Cancelled if there was none.
  absl::Status Check() const;
  // Returns the failure; OK when there was none.
  absl::Status failure() const;
  // Waits until the job does not go on. Returns false when it still does at `deadline`.
  bool WaitForEnd(TimePoint deadline) const;

 private:
  const std::string job_;
  std::atomic<bool> goes_on_{true};
  mutable Mutex mutex_;
  mutable CondVar ended_;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace thalweg
