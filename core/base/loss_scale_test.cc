#include "core/base/loss_scale.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace thalweg::loss_scale_test {
namespace {

constexpr double kHuge = std::numeric_limits<double>::max();
constexpr double kTiny = std::numeric_limits<double>::min();

std::vector<float> Rescaled(std::vector<float> values, double from, double to) {
  const double before = from;
  Rescale(values, from, to);
  EXPECT_EQ(from, to == kUnknownLossScale ? before : to);
  return values;
}

TEST(LossScaleTest, ResidualIsMultipliedByTheRatioOfTheScales) {
  const std::vector<float> values = {1, -3, 0, 0x1p-100f, 1.1f};
  EXPECT_EQ(Rescaled(values, 65536, 32768),
            (std::vector<float>{0.5f, -1.5f, 0, 0x1p-101f, 1.1f / 2}));
  EXPECT_EQ(Rescaled(values, 32768, 65536), (std::vector<float>{2, -6, 0, 0x1p-99f, 1.1f * 2}));
  EXPECT_EQ(Rescaled({1, -3}, 4, 6), (std::vector<float>{1.5f, -4.5f}));
}

TEST(LossScaleTest, ResidualStaysAsItIsWhereAScaleIsUnknown) {
  const std::vector<float> values = {1, -3};
  EXPECT_EQ(Rescaled(values, kUnknownLossScale, 65536), values);
  EXPECT_EQ(Rescaled(values, 65536, kUnknownLossScale), values);
  EXPECT_EQ(Rescaled(values, 65536, 65536), values);
}

TEST(LossScaleTest, NoScaleMakesAResidualInfinite) {
  for (const double from : {kTiny, 1.0, kHuge}) {
    for (const double to : {kTiny, 1.0, kHuge}) {
      for (const float value : Rescaled({3e38f, -3e38f, 1, 0x1p-149f}, from, to)) {
        EXPECT_TRUE(std::isfinite(value)) << from << " to " << to;
      }
    }
  }
  EXPECT_EQ(Rescaled({3e38f, 1}, 1, 2), (std::vector<float>{0, 2}));
}

TEST(LossScaleTest, OnlyPositiveFiniteNumbersAndUnknownAreScales) {
  for (const double scale : {kUnknownLossScale, kTiny, 1.0, 65536.0, kHuge}) {
    EXPECT_TRUE(IsLossScale(scale)) << scale;
  }
  constexpr double kInfinite = std::numeric_limits<double>::infinity();
  for (const double scale : {-1.0, kInfinite, -kInfinite, std::nan("")}) {
    EXPECT_FALSE(IsLossScale(scale)) << scale;
  }
}

}  // namespace
}  // namespace thalweg::loss_scale_test
