// Steady clocks of several hosts: whose a time is, and how two of them differ.
#pragma once

#include <cstdint>
#include <string>

#include "core/base/clock.h"

namespace thalweg {

struct ClockReading {
  // Names the clock: the host's boot, at which its steady clock began. All processes of a host read
  // the same one, also in containers. Empty: not known.
  std::string clock;
  int64_t nanos = 0;
};

// Now, by this host's steady clock.
ClockReading ReadClock();

// What another clock shows beyond ours.
struct ClockOffset {
  std::string clock;
  int64_t at = 0;  // nanoseconds of our clock
  int64_t nanos = 0;
  int64_t error = 0;  // wrong by this much at most
};

// From one call: `theirs` was read between `asked` and `answered`. As NTP does, takes it for read
// in the middle; the error is half the time in between.
ClockOffset OffsetOf(const ClockReading& theirs, TimePoint asked, TimePoint answered);

}  // namespace thalweg
