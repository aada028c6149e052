// This header keeps messages that strangers can cause from filling a log.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "core/base/clock.h"
#include "core/base/mutex.h"

namespace thalweg {

// A LogLimit counts the messages of one kind. Thread-safe.
class LogLimit {
 public:
  static constexpr uint32_t kLinesPerMinute = 60;

  // `kind` completes "messages …".
  explicit LogLimit(std::string kind) : kind_(std::move(kind)) {}

  // Returns whether a message may be logged: the first kLinesPerMinute of each minute may. Logs how
  // many were left out of the minute before, if any were.
  bool Admits(TimePoint now);

 private:
  const std::string kind_;

  Mutex mutex_;
  TimePoint begin_ ABSL_GUARDED_BY(mutex_);  // of the current minute
  uint32_t admitted_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t left_out_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace thalweg
