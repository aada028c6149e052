#include "server/sidecar/job/job_outcome.h"

#include "core/exchange/of_job.h"

namespace thalweg {

bool JobOutcome::Fail(const absl::Status& reason) {
  MutexLock lock(mutex_);
  if (!goes_on_) return false;
  failure_ = OfJob(job_, reason);
  goes_on_ = false;
  ended_.NotifyAll();
  return true;
}

void JobOutcome::End() {
  MutexLock lock(mutex_);
  goes_on_ = false;
  ended_.NotifyAll();
}

absl::Status JobOutcome::Check() const {
  if (goes_on_) return absl::OkStatus();
  MutexLock lock(mutex_);
  return failure_.ok() ? absl::CancelledError("the job has ended") : failure_;
}

absl::Status JobOutcome::failure() const {
  MutexLock lock(mutex_);
  return failure_;
}

bool JobOutcome::WaitForEnd(TimePoint deadline) const {
  MutexLock lock(mutex_);
  return ended_.WaitUntil(mutex_, deadline, [this] { return !goes_on_; });
}

}  // namespace thalweg
