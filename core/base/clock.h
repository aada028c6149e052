// Monotonic time. Logic that decides by time takes a TimePoint as an argument, so that its tests
// need neither sleeps nor a real clock; only the outermost loops call Now().
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace thalweg {

using TimePoint = std::chrono::steady_clock::time_point;
using Duration = std::chrono::steady_clock::duration;

inline TimePoint Now() { return std::chrono::steady_clock::now(); }

inline double ToSeconds(Duration d) { return std::chrono::duration<double>(d).count(); }
inline int64_t ToNanos(Duration d) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(d).count();
}
// Returns ten years at most, also for what is no number: a deadline so far off still is a
// TimePoint.
inline Duration FromSeconds(double s) {
  constexpr double kMost = 3600.0 * 24 * 365 * 10;
  return std::chrono::duration_cast<Duration>(
      std::chrono::duration<double>(s < kMost ? std::max(s, -kMost) : kMost));
}
// Returns a time that another process tells, or ten years if it tells more: a deadline so far off
// still is a TimePoint.
inline Duration FromMillis(uint64_t ms) {
  constexpr std::chrono::hours kMost(24 * 365 * 10);
  constexpr uint64_t kMostMillis = std::chrono::milliseconds(kMost).count();
  return std::chrono::milliseconds(std::min(ms, kMostMillis));
}

// The same of a time that a caller gives; none is negative.
inline Duration Bounded(std::chrono::milliseconds time) {
  return FromMillis(static_cast<uint64_t>(std::max<int64_t>(0, time.count())));
}

// The deadline of a thread's idle wait that its owner's Stop() ends by making the predicate true. A
// thread that waits for another process uses a real deadline.
inline constexpr TimePoint kUntilStopped = TimePoint::max();

// Returns the time left until `deadline`, never negative.
inline Duration Remaining(TimePoint deadline, TimePoint now) {
  return std::max(Duration::zero(), deadline - now);
}

// A LayeredTimeout divides one user-visible timeout among the layers that wait for each other. The
// innermost layer knows best who is missing, so it times out first and the user reads its message.
struct LayeredTimeout {
  Duration worker;

  Duration sidecar() const { return worker * 9 / 10; }
  Duration shard() const { return worker * 8 / 10; }
};

// A Patience says how long processes of a job wait for each other.
struct Patience {
  LayeredTimeout silence;  // for one that shows no sign of life
  LayeredTimeout step;     // for one that does, but does not come to the step that others are in
};

// Whoever waits for a process that has nothing to say hears from it this often per timeout.
inline constexpr int kSignsOfLife = 8;

}  // namespace thalweg
