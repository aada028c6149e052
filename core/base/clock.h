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
inline Duration FromSeconds(double s) {
  return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(s));
}

// For the idle wait of a thread that is ended by its owner's Stop(), which makes the predicate
// true. Whoever waits for another process uses a real deadline.
inline constexpr TimePoint kUntilStopped = TimePoint::max();

// Time left until `deadline`, never negative.
inline Duration Remaining(TimePoint deadline, TimePoint now) {
  return std::max(Duration::zero(), deadline - now);
}

// How one user-visible timeout is shared by the layers that wait for each other: the innermost one
// knows best who is missing, so it gives up first and its message is what the user reads.
struct LayeredTimeout {
  Duration worker;

  Duration sidecar() const { return worker * 9 / 10; }
  Duration shard() const { return worker * 8 / 10; }
};

}  // namespace thalweg
