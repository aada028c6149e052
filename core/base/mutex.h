// std::mutex with Clang's thread-safety annotations.
//
// Not absl::Mutex: the packaged Abseil is not instrumented, so ThreadSanitizer reports correct code
// that uses it as a race. See docs/adr/0003-std-mutex-wrapper.md.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

#include "absl/base/thread_annotations.h"
#include "core/base/clock.h"

namespace thalweg {

class ABSL_LOCKABLE Mutex {
 public:
  void Lock() ABSL_EXCLUSIVE_LOCK_FUNCTION() { mutex_.lock(); }
  void Unlock() ABSL_UNLOCK_FUNCTION() { mutex_.unlock(); }

 private:
  friend class CondVar;
  std::mutex mutex_;
};

class ABSL_SCOPED_LOCKABLE MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) ABSL_EXCLUSIVE_LOCK_FUNCTION(mutex) : mutex_(mutex) {
    mutex_.Lock();
  }
  ~MutexLock() ABSL_UNLOCK_FUNCTION() { mutex_.Unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

// A CondVar has no Wait() without a deadline, because every wait must have one.
class CondVar {
 public:
  void NotifyAll() { cv_.notify_all(); }

  // Waits until `ready()` holds or `deadline` passes; returns the last value of `ready()`. Requires
  // that `mutex` is held; it is released while waiting, and `ready` runs with it held.
  template <typename Predicate>
  bool WaitUntil(Mutex& mutex, TimePoint deadline, Predicate ready)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    std::unique_lock<std::mutex> lock(mutex.mutex_, std::adopt_lock);
    const bool result = cv_.wait_until(lock, deadline, std::move(ready));
    lock.release();
    return result;
  }

 private:
  std::condition_variable cv_;
};

}  // namespace thalweg
