// Recorder and RecordingEvents keep what this room's tests wait for, and a Choice what they choose.
#pragma once

#include <utility>
#include <vector>

#include "core/base/clock.h"
#include "core/base/mutex.h"
#include "core/base/testing/test_patience.h"
#include "core/exchange/events.h"

namespace thalweg {

// A Recorder collects values that any thread may add, and lets a test wait for them.
template <typename T>
class Recorder {
 public:
  void Add(T value) {
    MutexLock lock(mutex_);
    values_.push_back(std::move(value));
    changed_.NotifyAll();
  }
  // Waits for `count` values and returns them, or the values so far after the deadline.
  std::vector<T> WaitFor(size_t count) {
    MutexLock lock(mutex_);
    changed_.WaitUntil(mutex_, Now() + kTestPatience, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return values_.size() >= count;
    });
    return values_;
  }
  std::vector<T> Get() { return WaitFor(0); }

 private:
  Mutex mutex_;
  CondVar changed_;
  std::vector<T> values_;
};

// A Choice is what a test lets a double do; it may change while other threads ask for it.
template <typename T>
class Choice {
 public:
  explicit Choice(T value) : value_(std::move(value)) {}
  Choice& operator=(T value) {
    MutexLock lock(mutex_);
    value_ = std::move(value);
    return *this;
  }
  T Get() const {
    MutexLock lock(mutex_);
    return value_;
  }

 private:
  mutable Mutex mutex_;
  T value_;
};

class RecordingEvents : public MemberEvents {
 public:
  void OnResult(RoundResult result) override { results.Add(std::move(result)); }
  void OnFailed(absl::Status why) override { failures.Add(std::move(why)); }

  Recorder<RoundResult> results;
  Recorder<absl::Status> failures;
};

}  // namespace thalweg
