#include "server/base/fair_quota.h"

#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"

namespace thalweg::fair_quota_test {
namespace {

// Takes one place after the other for as long as that is allowed; returns how many.
uint64_t TakeAll(FairQuota& places, const std::string& who) {
  uint64_t taken = 0;
  for (; places.MayTake(who, 1); ++taken) places.Take(who, 1);
  return taken;
}

TEST(FairQuotaTest, OneTakerGetsHalfAndTheNextHalfOfTheRest) {
  FairQuota places(1024);
  EXPECT_EQ(TakeAll(places, "stranger"), 512u);
  EXPECT_EQ(TakeAll(places, "node"), 256u);
  EXPECT_EQ(TakeAll(places, "other"), 128u);
  EXPECT_EQ(places.taken(), 896u);
}

TEST(FairQuotaTest, NoNumberOfTakersExhaustsThePlacesBeforeEachHasOne) {
  FairQuota places(1024);
  uint64_t takers = 0;
  while (TakeAll(places, absl::StrCat("taker ", takers)) > 0) ++takers;
  EXPECT_GE(takers, 10u);  // each leaves half of what it has found
}

TEST(FairQuotaTest, OurselvesMayTakeWhatIsFree) {
  FairQuota places(10);
  places.Take("stranger", 5);
  EXPECT_EQ(TakeAll(places, ""), 5u);
  EXPECT_FALSE(places.MayTake("node", 1));
}

TEST(FairQuotaTest, SeveralAtOnceCountAsMany) {
  FairQuota places(10);
  EXPECT_TRUE(places.MayTake("node", 5));
  EXPECT_FALSE(places.MayTake("node", 6));
  EXPECT_FALSE(places.MayTake("", 11));
}

TEST(FairQuotaTest, ReturnedPlacesCanBeTakenAgain) {
  FairQuota places(4);
  places.Take("node", 2);
  EXPECT_FALSE(places.MayTake("node", 1));
  places.Return("node", 1);
  EXPECT_EQ(places.taken_by("node"), 1u);
  EXPECT_TRUE(places.MayTake("node", 1));
  places.Return("node", 1);
  EXPECT_EQ(places.taken(), 0u);
}

}  // namespace
}  // namespace thalweg::fair_quota_test
