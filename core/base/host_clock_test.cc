#include "core/base/host_clock.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>

namespace thalweg::host_clock_test {
namespace {

using std::chrono::microseconds;

TEST(HostClockTest, ReadingIsTheSteadyClockAndNamesTheHost) {
  const TimePoint before = Now();
  const ClockReading reading = ReadClock();
  EXPECT_GE(reading.nanos, ToNanos(before.time_since_epoch()));
  EXPECT_LE(reading.nanos, ToNanos(Now().time_since_epoch()));
  EXPECT_FALSE(reading.clock.empty());
  EXPECT_EQ(ReadClock().clock, reading.clock);
}

// Their clock is 3 s ahead. A call takes 10 ms, divided arbitrarily between the two directions: the
// offset is wrong by no more than its stated error.
TEST(HostClockTest, OffsetIsWithinItsErrorWhicheverWayIsTheLongerOne) {
  constexpr int64_t kAhead = 3'000'000'000;
  const TimePoint asked = TimePoint(std::chrono::seconds(100));
  const TimePoint answered = asked + microseconds(10'000);
  for (const auto there : {microseconds(0), microseconds(5'000), microseconds(10'000)}) {
    const ClockReading theirs{"boot", ToNanos((asked + there).time_since_epoch()) + kAhead};
    const ClockOffset offset = OffsetOf(theirs, asked, answered);
    EXPECT_EQ(offset.clock, "boot");
    EXPECT_EQ(offset.at, 100'005'000'000);
    EXPECT_LE(std::abs(offset.nanos - kAhead), offset.error) << there.count();
    EXPECT_LE(offset.error, 5'000'001);
  }
}

TEST(ClockTest, TimesThatACallerGivesAreBetweenNothingAndTenYears) {
  using std::chrono::milliseconds;
  constexpr Duration kYears = std::chrono::hours(10 * 365 * 24);
  EXPECT_EQ(Bounded(milliseconds(1500)), milliseconds(1500));
  EXPECT_EQ(Bounded(milliseconds::max()), kYears);
  EXPECT_EQ(Bounded(milliseconds::min()), Duration::zero());
}

}  // namespace
}  // namespace thalweg::host_clock_test
