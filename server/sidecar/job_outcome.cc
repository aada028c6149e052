#include "server/sidecar/job_outcome.h"

#include "core/base/exchange.h"

namespace thalweg {

bool JobOutcome::Fail(const absl::Status& reason) {
  MutexLock lock(mutex_);
  if (!goes_on_) return false;
  failure_ = OfJob(job_, reason);
  goes_on_ = false;
  return true;
}

void JobOutcome::End() {
  MutexLock lock(mutex_);
  goes_on_ = false;
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

}  // namespace thalweg
