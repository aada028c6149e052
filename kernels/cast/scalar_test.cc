#include "kernels/cast/scalar.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cast/element.h"

namespace thalweg::scalar_test {
namespace {

// The two formats are defined by their fraction bits and the exponent of the least normal number.
struct Fp16Format {
  using Element = Fp16;
  static constexpr int kFractionBits = 10;
  static constexpr int kMinExponent = -14;
};
struct BFloat16Format {
  using Element = BFloat16;
  static constexpr int kFractionBits = 7;
  static constexpr int kMinExponent = -126;
};

// Returns the value of a pattern without sign. For infinity this is the power of two that would
// follow the largest value, as the rule for rounding to infinity requires.
template <class Format>
double Value(uint16_t magnitude) {
  const int exponent = magnitude >> Format::kFractionBits;
  const int fraction = magnitude & ((1 << Format::kFractionBits) - 1);
  const int least = Format::kMinExponent - Format::kFractionBits;
  if (exponent == 0) return std::ldexp(fraction, least);
  return std::ldexp(fraction + (1 << Format::kFractionBits), least + exponent - 1);
}

// Rounding searches among all existing values; every difference is exact in double.
template <class Format>
class Rounding {
 public:
  Rounding() {
    for (uint32_t bits = 0; bits <= Format::Element::kInfinity; ++bits) {
      values_.push_back(Value<Format>(static_cast<uint16_t>(bits)));
    }
  }

  uint16_t NearestEven(float number) const {
    const uint16_t sign = std::signbit(number) ? 0x8000 : 0;
    const double magnitude = std::fabs(static_cast<double>(number));
    const auto above = std::upper_bound(values_.begin(), values_.end(), magnitude);
    if (above == values_.end()) return sign | Format::Element::kInfinity;
    const auto upper = static_cast<uint16_t>(above - values_.begin());
    const auto lower = static_cast<uint16_t>(upper - 1);
    const double to_upper = values_[upper] - magnitude;
    const double to_lower = magnitude - values_[lower];
    if (to_upper != to_lower) return sign | (to_upper < to_lower ? upper : lower);
    return sign | (upper % 2 == 0 ? upper : lower);
  }

 private:
  std::vector<double> values_;
};

template <class Format>
class ScalarTest : public ::testing::Test {};
using Formats = ::testing::Types<Fp16Format, BFloat16Format>;
TYPED_TEST_SUITE(ScalarTest, Formats);

TYPED_TEST(ScalarTest, WideningGivesTheValueTheFormatDefines) {
  using Element = typename TypeParam::Element;
  for (uint32_t bits = 0; bits < Element::kInfinity; ++bits) {
    const auto magnitude = static_cast<uint16_t>(bits);
    const double value = Value<TypeParam>(magnitude);
    ASSERT_EQ(Element::Widen(magnitude), value) << bits;
    const float negative = Element::Widen(magnitude | 0x8000);
    ASSERT_EQ(negative, -value) << bits;
    ASSERT_TRUE(std::signbit(negative)) << bits;
  }
  EXPECT_EQ(Element::Widen(Element::kInfinity), HUGE_VALF);
  EXPECT_EQ(Element::Widen(Element::kInfinity | 0x8000), -HUGE_VALF);
}

TYPED_TEST(ScalarTest, EveryPatternSurvivesWideningAndNarrowingWithNaNQuieted) {
  using Element = typename TypeParam::Element;
  for (uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const bool nan = (bits & Element::kMagnitude) > Element::kInfinity;
    const float wide = Element::Widen(static_cast<uint16_t>(bits));
    ASSERT_EQ(std::isnan(wide), nan) << bits;
    ASSERT_EQ(Element::Narrow(wide), nan ? (bits | Element::kNan) : bits) << bits;
  }
}

TYPED_TEST(ScalarTest, NarrowingRoundsToNearestTiesToEven) {
  using Element = typename TypeParam::Element;
  const Rounding<TypeParam> rounding;
  for (uint32_t bits = 0; bits < Element::kInfinity; ++bits) {
    const double lower = Value<TypeParam>(static_cast<uint16_t>(bits));
    const double upper = Value<TypeParam>(static_cast<uint16_t>(bits + 1));
    const auto tie = static_cast<float>((lower + upper) / 2);
    for (float number : {tie, std::nextafter(tie, 0.0f), std::nextafter(tie, HUGE_VALF)}) {
      ASSERT_EQ(Element::Narrow(number), rounding.NearestEven(number)) << number;
      ASSERT_EQ(Element::Narrow(-number), rounding.NearestEven(-number)) << number;
    }
  }
}

TYPED_TEST(ScalarTest, NarrowingRoundsArbitraryNumbersToNearest) {
  using Element = typename TypeParam::Element;
  const Rounding<TypeParam> rounding;
  std::mt19937 random(1);
  for (int i = 0; i < 300000; ++i) {
    const float number = BitCast<float>(static_cast<uint32_t>(random()));
    if (std::isnan(number)) continue;
    ASSERT_EQ(Element::Narrow(number), rounding.NearestEven(number)) << number;
  }
}

TEST(ScalarNarrowingTest, NaNKeepsSignAndUpperPayloadAndBecomesQuiet) {
  EXPECT_EQ(Fp16FromFp32(0x7fc00000u), 0x7e00);
  EXPECT_EQ(Fp16FromFp32(0xffc00000u), 0xfe00);
  EXPECT_EQ(Fp16FromFp32(0x7f800001u),
            0x7e00);  // signalling, with a payload only in the bits that are lost
  EXPECT_EQ(Fp16FromFp32(0xffaaa000u), 0xff55);
  EXPECT_EQ(BFloat16FromFp32(0x7f800001u), 0x7fc0);
  EXPECT_EQ(BFloat16FromFp32(0xff950000u), 0xffd5);
  EXPECT_EQ(BFloat16FromFp32(0x7fffffffu), 0x7fff);  // rounding it up would make it -0
}

TEST(ScalarNarrowingTest, OverflowStartsHalfAUnitAboveTheLargestValue) {
  EXPECT_EQ(Fp16::Narrow(std::nextafter(Fp16::kOverflow, 0.0f)), 0x7bff);
  EXPECT_EQ(Fp16::Narrow(Fp16::kOverflow), 0x7c00);
  EXPECT_EQ(BFloat16::Narrow(std::nextafter(BFloat16::kOverflow, 0.0f)), 0x7f7f);
  EXPECT_EQ(BFloat16::Narrow(BFloat16::kOverflow), 0x7f80);
}

}  // namespace
}  // namespace thalweg::scalar_test
