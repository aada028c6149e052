// FairSemaphore counts what may exist only so many times at once, for all callers together.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "core/base/mutex.h"
#include "server/base/fair_quota.h"

namespace thalweg {

// A FairSemaphore is thread-safe and must outlive the places that are taken.
class FairSemaphore {
 public:
  explicit FairSemaphore(uint32_t count) : places_(count) {}

  // Returns a place for a caller at `where`, which is free again when the last copy of the result
  // is destroyed; null when all are taken, or callers there have their share (FairQuota).
  std::shared_ptr<void> Take(const std::string& where) {
    MutexLock lock(mutex_);
    if (!places_.MayTake(where, 1)) return nullptr;
    places_.Take(where, 1);
    return {this, [where](FairSemaphore* semaphore) { semaphore->Return(where); }};
  }

 private:
  void Return(const std::string& where) {
    MutexLock lock(mutex_);
    places_.Return(where, 1);
  }

  Mutex mutex_;
  FairQuota places_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace thalweg
