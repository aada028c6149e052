#include "core/base/env.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

namespace thalweg::env_test {
namespace {

TEST(EnvTest, UnsetAndEmptyMeanDefault) {
  unsetenv("THALWEG_TIMEOUT");
  EXPECT_EQ(GetEnv("THALWEG_TIMEOUT"), "30");
  setenv("THALWEG_TIMEOUT", "", 1);
  EXPECT_EQ(GetEnv("THALWEG_TIMEOUT"), "30");
  setenv("THALWEG_TIMEOUT", "5", 1);
  EXPECT_EQ(GetEnv("THALWEG_TIMEOUT"), "5");
  unsetenv("THALWEG_TIMEOUT");
}

TEST(EnvTest, MisspeltVariableIsReported) {
  setenv("THALWEG_TIMOUT", "5", 1);
  EXPECT_THAT(UnknownEnvVars(), ::testing::Contains("THALWEG_TIMOUT"));
  unsetenv("THALWEG_TIMOUT");
  EXPECT_THAT(UnknownEnvVars(), ::testing::Not(::testing::Contains("THALWEG_TIMOUT")));
}

}  // namespace
}  // namespace thalweg::env_test
