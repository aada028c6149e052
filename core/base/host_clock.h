// This header compares the steady clocks of several hosts.
#pragma once

#include <cstdint>
#include <string>

#include "core/base/clock.h"

namespace thalweg {

struct ClockReading {
  // Identifies the clock: the boot of the host, at which its steady clock began. All processes of a
  // host read the same one, also in containers. Empty when unknown.
  std::string clock;
  int64_t nanos = 0;
};

// Reads this host's steady clock.
ClockReading ReadClock();

// A ClockOffset is the difference between another clock and ours.
struct ClockOffset {
  std::string clock;
  int64_t at = 0;  // nanoseconds of our clock
  int64_t nanos = 0;
  int64_t error = 0;  // maximal error
};

// Estimates the offset from one call: `theirs` was read between `asked` and `answered`. Like NTP,
// it assumes the middle; the error is half the time in between.
ClockOffset OffsetOf(const ClockReading& theirs, TimePoint asked, TimePoint answered);

}  // namespace thalweg
