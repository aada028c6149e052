#include "server/sidecar/collective/parts_count.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace thalweg::parts_count_test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(PartsCountTest, APartIsTakenOnceWhenItsLastByteHasCome) {
  PartsCount parts(25, 10);
  parts.Add(5, 12);
  EXPECT_THAT(parts.Take(), IsEmpty());
  parts.Add(0, 5);
  EXPECT_THAT(parts.Take(), ElementsAre(0));
  EXPECT_THAT(parts.Take(), IsEmpty());
  parts.Add(20, 25);
  parts.Add(12, 20);
  EXPECT_THAT(parts.Take(), ElementsAre(2, 1));
  EXPECT_EQ(parts.Begin(2), 20u);
  EXPECT_EQ(parts.End(2), 25u);
}

TEST(PartsCountTest, OneWithoutPartsCountsNothing) {
  PartsCount parts;
  parts.Add(0, 100);
  EXPECT_THAT(parts.Take(), IsEmpty());
}

}  // namespace
}  // namespace thalweg::parts_count_test
