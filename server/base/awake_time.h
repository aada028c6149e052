// An AwakeTime notices that this process did not run for a while: it was stopped, or its machine
// was.
#pragma once

#include "core/base/clock.h"

namespace thalweg {

// Whoever has said nothing to a process that did not run may have spoken all the same. An AwakeTime
// is not thread-safe.
class AwakeTime {
 public:
  // The process looks more often than once in `longest` while it runs.
  AwakeTime(TimePoint start, Duration longest) : since_(start), looked_(start), longest_(longest) {}

  // Returns since when the process has run. Call it in each turn of a loop, with the time.
  TimePoint Look(TimePoint now) {
    if (now - looked_ > longest_) since_ = now;
    looked_ = now;
    return since_;
  }

 private:
  TimePoint since_;
  TimePoint looked_;
  Duration longest_;
};

}  // namespace thalweg
