#include "server/aggregator/memory_budget.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <optional>
#include <string>

#include "core/base/thread.h"

namespace thalweg::memory_budget_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(MemoryBudgetTest, WhatDoesNotFitIsRefusedWithTheNumbersAndChangesNothing) {
  Gauge gauge;
  MemoryBudget budget(1000, gauge);
  MemoryBudget::Reservation first(budget);
  MemoryBudget::Reservation second(budget);
  ASSERT_TRUE(first.Resize(300).ok());
  ASSERT_TRUE(second.Resize(700).ok());
  const absl::Status refused = first.Resize(301);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()),
              AllOf(HasSubstr("needs 301 bytes"), HasSubstr("300 of the limit of 1000")));
  EXPECT_EQ(first.bytes(), 300u);
  EXPECT_EQ(budget.reserved(), 1000u);
  EXPECT_EQ(gauge.Value(), 1000);
  EXPECT_FALSE(second.Resize(std::numeric_limits<uint64_t>::max()).ok());
}

TEST(MemoryBudgetTest, WhatIsReturnedIsFreeForOthers) {
  Gauge gauge;
  MemoryBudget budget(1000, gauge);
  MemoryBudget::Reservation kept(budget);
  {
    std::optional<MemoryBudget::Reservation> ended(std::in_place, budget);
    ASSERT_TRUE(ended->Resize(1000).ok());
    EXPECT_FALSE(kept.Resize(1).ok());
    ASSERT_TRUE(ended->Resize(600).ok());
    EXPECT_TRUE(kept.Resize(400).ok());
  }
  EXPECT_EQ(budget.reserved(), 400u);
  EXPECT_TRUE(kept.Resize(1000).ok());
  kept.Release();
  EXPECT_EQ(budget.reserved(), 0u);
  EXPECT_EQ(gauge.Value(), 0);
}

TEST(MemoryBudgetTest, PartReservesFromTheWholeAndChangesNothingWhenEitherHasTooLittle) {
  Gauge gauge;
  Gauge part_gauge;
  MemoryBudget whole(1000, gauge);
  MemoryBudget part(600, part_gauge, "the quota", &whole);
  MemoryBudget::Reservation in_part(part);
  MemoryBudget::Reservation beside(whole);
  ASSERT_TRUE(in_part.Resize(500).ok());
  EXPECT_EQ(whole.reserved(), 500u);
  EXPECT_THAT(std::string(in_part.Resize(601).message()), HasSubstr("600 of the quota of 600"));
  ASSERT_TRUE(beside.Resize(450).ok());
  EXPECT_THAT(std::string(in_part.Resize(551).message()), HasSubstr("550 of the limit of 1000"));
  EXPECT_EQ(part.reserved(), 500u);
  EXPECT_EQ(part_gauge.Value(), 500);
  EXPECT_EQ(whole.reserved(), 950u);
  in_part.Release();
  EXPECT_EQ(part.reserved(), 0u);
  EXPECT_EQ(whole.reserved(), 450u);
}

TEST(MemoryBudgetTest, LimitBelowWhatIsReservedLetsReservationsShrinkOnly) {
  Gauge gauge;
  MemoryBudget budget(1000, gauge);
  MemoryBudget::Reservation first(budget);
  MemoryBudget::Reservation second(budget);
  ASSERT_TRUE(first.Resize(400).ok() && second.Resize(400).ok());
  budget.SetLimit(300);
  EXPECT_THAT(std::string(first.Resize(401).message()), HasSubstr("0 of the limit of 300"));
  EXPECT_TRUE(first.Resize(350).ok());
  EXPECT_TRUE(second.Resize(0).ok());
  EXPECT_FALSE(first.Resize(351).ok());
  EXPECT_TRUE(first.Resize(0).ok() && first.Resize(300).ok());
}

TEST(MemoryBudgetTest, ThreadsNeverReserveMoreThanTheLimit) {
  Gauge gauge;
  MemoryBudget budget(10, gauge);
  const auto reserve = [&budget] {
    for (int i = 0; i < 1000; ++i) {
      MemoryBudget::Reservation reservation(budget);
      reservation.Resize(6).IgnoreError();
      EXPECT_LE(budget.reserved(), 10u);
    }
  };
  {
    Thread a("reserve", reserve);
    Thread b("reserve", reserve);
  }
  EXPECT_EQ(budget.reserved(), 0u);
  EXPECT_EQ(gauge.Value(), 0);
}

}  // namespace
}  // namespace thalweg::memory_budget_test
