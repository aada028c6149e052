#include "server/base/awake_time.h"

#include <gtest/gtest.h>

namespace thalweg::awake_time_test {
namespace {

using std::chrono::seconds;

TEST(AwakeTimeTest, ProcessThatLooksOftenHasRunFromTheStartAndAfterAPauseFromItsEnd) {
  const TimePoint start = Now();
  AwakeTime awake(start, seconds(2));
  EXPECT_EQ(awake.Look(start + seconds(2)), start);
  EXPECT_EQ(awake.Look(start + seconds(4)), start);
  EXPECT_EQ(awake.Look(start + seconds(7)), start + seconds(7));
  EXPECT_EQ(awake.Look(start + seconds(8)), start + seconds(7));
}

}  // namespace
}  // namespace thalweg::awake_time_test
