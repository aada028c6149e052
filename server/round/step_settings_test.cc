#include "server/round/step_settings.h"

#include <gtest/gtest.h>

namespace thalweg::step_settings_test {
namespace {

UpdateStep WithRate(double lr) { return {{GroupStep{.lr = 1}, GroupStep{.lr = lr}}}; }

TEST(StepSettingsTest, SettingsAreThoseOfTheirNumber) {
  StepSettings settings;
  ASSERT_TRUE(settings.Set("host0", 1, WithRate(0.1)).ok());
  ASSERT_TRUE(settings.Set("host0", 2, WithRate(0.2)).ok());
  ASSERT_TRUE(settings.Set("host1", 1, WithRate(0.1)).ok());
  EXPECT_EQ(*settings.Find(1), WithRate(0.1));
  EXPECT_EQ(*settings.Find(2), WithRate(0.2));
  EXPECT_EQ(settings.Find(3), nullptr);
}

TEST(StepSettingsTest, NodesThatDifferAreNamedWithTheSetting) {
  StepSettings settings;
  ASSERT_TRUE(settings.Set("host0", 5, WithRate(0.1)).ok());
  EXPECT_EQ(
      settings.Set("host1", 5, WithRate(0.2)),
      absl::InvalidArgumentError("host1 gives settings 5 with lr 0.2 of group 1, host0 with 0.1"));
  EXPECT_EQ(settings.Set("host1", 5, {{GroupStep{.lr = 1}}}),
            absl::InvalidArgumentError("host1 gives settings 5 with 1 groups, host0 with 2"));
  EXPECT_EQ(*settings.Find(5), WithRate(0.1));
}

TEST(StepSettingsTest, OldOnesAreForgottenAndNotTakenAgain) {
  StepSettings settings;
  for (uint64_t number = 1; number <= StepSettings::kKept + 2; ++number) {
    ASSERT_TRUE(settings.Set("host0", number, WithRate(0.1)).ok());
  }
  EXPECT_EQ(settings.Find(2), nullptr);
  EXPECT_NE(settings.Find(3), nullptr);
  EXPECT_EQ(
      settings.Set("host1", 2, WithRate(0.1)),
      absl::FailedPreconditionError("host1 gives settings 2, but the oldest that are kept are 3"));
}

TEST(StepSettingsTest, WhatCannotBeIsRefused) {
  StepSettings settings;
  EXPECT_FALSE(settings.Set("host0", 0, WithRate(0.1)).ok());
  EXPECT_FALSE(settings.Set("host0", 1, WithRate(-1)).ok());
}

}  // namespace
}  // namespace thalweg::step_settings_test
