#include "kernels/reduce/divide.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <vector>

namespace thalweg::divide_test {
namespace {

// Many mantissas, all exponents, both signs, and what is no number.
std::vector<float> Dividends() {
  std::mt19937_64 source(7);
  std::vector<float> values = {0.0f,
                               -0.0f,
                               std::numeric_limits<float>::infinity(),
                               std::numeric_limits<float>::denorm_min(),
                               std::numeric_limits<float>::max(),
                               -std::numeric_limits<float>::min()};
  while (values.size() < 20'000) values.push_back(Fp32::Widen(static_cast<uint32_t>(source())));
  return values;
}

std::vector<float> Divisors() {
  std::mt19937_64 source(8);
  std::vector<float> divisors = {1e-30f, 0.75f, 16777215.0f, 16777217.0f, 0x1.fffffep23f, 3e30f};
  for (int whole = 1; whole < 200; ++whole) divisors.push_back(static_cast<float>(whole));
  std::uniform_real_distribution<float> any(1, 0x1p24f);
  while (divisors.size() < 400) divisors.push_back(any(source));
  return divisors;
}

TEST(DivideTest, GivesTheBitsOfADivision) {
  for (const float divisor : Divisors()) {
    for (const float dividend : Dividends()) {
      float values[] = {dividend};
      Divide(Divisor(divisor), values);
      const float expected = dividend / divisor;
      if (expected != expected) {
        ASSERT_NE(values[0], values[0]);
      } else {
        ASSERT_EQ(Fp32::Narrow(values[0]), Fp32::Narrow(expected)) << dividend << " / " << divisor;
      }
    }
  }
}

TEST(DivideTest, NumbersOfOrdinarySizeNeedNoDivision) {
  for (const float x : {1.0f, -1e-3f, 0.0f, 1e-20f}) EXPECT_TRUE(Divisor(3).Suits(x));
  EXPECT_FALSE(Divisor(3).Suits(1e-38f));
  EXPECT_FALSE(Divisor(0.5f).Suits(1));
}

// One that does not suit must not change what its neighbours get.
TEST(DivideTest, NeighboursOfASmallNumberAreDividedToo) {
  float values[] = {1.0f, 1e-42f, -2.0f, 0.0f};
  Divide(Divisor(3), values);
  EXPECT_EQ(values[0], 1.0f / 3);
  EXPECT_EQ(values[1], 1e-42f / 3);
  EXPECT_EQ(values[2], -2.0f / 3);
  EXPECT_EQ(values[3], 0.0f);
}

}  // namespace
}  // namespace thalweg::divide_test
