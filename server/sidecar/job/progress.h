// When something last came for a job: the sign of life from which its deadlines are measured.
#pragma once

#include <atomic>

#include "core/base/clock.h"

namespace thalweg {

// Thread-safe.
class Progress {
 public:
  void Note(TimePoint now) {
    last_.store(now.time_since_epoch().count(), std::memory_order_relaxed);
  }
  TimePoint last() const { return TimePoint(Duration(last_.load(std::memory_order_relaxed))); }

 private:
  std::atomic<Duration::rep> last_{0};
};

}  // namespace thalweg
