#include "kernels/reduce/fold_elements.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "kernels/cast/element.h"
#include "kernels/cast/test_util.h"

namespace thalweg::fold_elements_test {
namespace {

struct Result {
  std::vector<std::byte> out;
  uint64_t nonfinite = 0;
  bool operator==(const Result&) const = default;
};

template <class Element>
typename Element::Accumulator Combine(Fold fold, typename Element::Accumulator a,
                                      typename Element::Accumulator b) {
  if (fold == Fold::kSum) return a + b;
  if (fold == Fold::kProduct) return a * b;
  if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<float>::quiet_NaN();
  if (fold == Fold::kMin) return std::min(a, b);
  return std::max(a, b);
}

// Computes the definition in fold_elements.h, element by element.
template <class Element>
Result Reference(Fold fold, const std::vector<std::vector<std::byte>>& inputs, size_t elems) {
  Result result;
  result.out.resize(elems * sizeof(typename Element::Bits));
  for (size_t i = 0; i < elems; ++i) {
    auto folded = Element::Widen(LoadBits<Element>(inputs[0].data(), i));
    for (size_t k = 1; k < inputs.size(); ++k) {
      folded =
          Combine<Element>(fold, folded, Element::Widen(LoadBits<Element>(inputs[k].data(), i)));
    }
    typename Element::Bits bits = Element::Narrow(folded);
    const auto rounded = Element::Widen(bits);
    if (std::isnan(rounded)) bits = Element::kNan;
    if (!std::isfinite(rounded)) ++result.nonfinite;
    StoreBits<Element>(bits, result.out.data(), i);
  }
  return result;
}

template <class Element>
class FoldElementsTest : public ::testing::Test {};
using Elements = ::testing::Types<Fp32, Fp16, BFloat16, Fp64>;
TYPED_TEST_SUITE(FoldElementsTest, Elements);

TYPED_TEST(FoldElementsTest, EqualsItsDefinitionForAnySizeAddressAndNumber) {
  std::mt19937_64 random(3);
  for (const Fold fold : {Fold::kSum, Fold::kMin, Fold::kMax, Fold::kProduct}) {
    for (const size_t elems : {0, 1, 7, 64, 511, 512, 513, 1100}) {
      for (size_t count = 1; count <= 4; ++count) {
        std::vector<std::vector<std::byte>> inputs;
        std::vector<Buffer> buffers;
        std::vector<const void*> pointers;
        for (size_t k = 0; k < count; ++k) {
          inputs.push_back(RandomElements<TypeParam>(elems, k % 2 == 0 ? 9 : 0, random));
          buffers.emplace_back(kMisalignments[k % kMisalignments.size()], inputs[k]);
        }
        for (Buffer& buffer : buffers) pointers.push_back(buffer.Data());
        Buffer out(kMisalignments[1], elems * sizeof(typename TypeParam::Bits));
        Result got;
        got.nonfinite = FoldElements(fold, pointers, kTypeOf<TypeParam>, out.Data(), elems);
        got.out = out.Content();
        ASSERT_EQ(got, Reference<TypeParam>(fold, inputs, elems))
            << Name(fold) << " of " << count << " arrays of " << elems;
      }
    }
  }
}

TEST(FoldElementsOrderTest, NaNGoesThroughMinimumAndMaximumWhereverItIs) {
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> first = {kNaN, 1, -2, 4}, second = {0, kNaN, 3, -0.5f};
  const std::vector<const void*> inputs = {first.data(), second.data()};
  std::vector<float> out(4);
  EXPECT_EQ(FoldElements(Fold::kMin, inputs, DType::kFloat32, out.data(), 4), 2u);
  EXPECT_TRUE(std::isnan(out[0]) && std::isnan(out[1]));
  EXPECT_EQ(out[2], -2);
  EXPECT_EQ(out[3], -0.5f);
  EXPECT_EQ(FoldElements(Fold::kMax, inputs, DType::kFloat32, out.data(), 4), 2u);
  EXPECT_TRUE(std::isnan(out[0]) && std::isnan(out[1]));
  EXPECT_EQ(out[2], 3);
  EXPECT_EQ(out[3], 4);
}

template <class Int>
Int Whole(Fold fold, Int a, Int b) {
  const auto left = static_cast<uint64_t>(a), right = static_cast<uint64_t>(b);
  switch (fold) {
    case Fold::kSum:
      return static_cast<Int>(left + right);
    case Fold::kProduct:
      return static_cast<Int>(left * right);
    case Fold::kMin:
      return a < b ? a : b;
    case Fold::kMax:
      return a < b ? b : a;
    case Fold::kBitAnd:
      return static_cast<Int>(left & right);
    case Fold::kBitOr:
      return static_cast<Int>(left | right);
    default:
      return static_cast<Int>(left ^ right);
  }
}

template <class Int>
void ExpectIntegersFold(DType type) {
  std::mt19937_64 random(5);
  for (int number = 1; number <= 7; ++number) {
    const auto fold = static_cast<Fold>(number);
    for (const size_t elems : {0, 1, 511, 512, 513, 1100}) {
      std::vector<std::vector<Int>> inputs(3, std::vector<Int>(elems));
      std::vector<const void*> pointers;
      for (auto& input : inputs) {
        for (Int& value : input) value = static_cast<Int>(random());
        pointers.push_back(input.data());
      }
      std::vector<Int> expected(elems), got(elems);
      for (size_t i = 0; i < elems; ++i) {
        expected[i] = Whole(fold, Whole(fold, inputs[0][i], inputs[1][i]), inputs[2][i]);
      }
      EXPECT_EQ(FoldElements(fold, pointers, type, got.data(), elems), 0u);
      ASSERT_EQ(got, expected) << Name(fold) << " of " << elems << " " << Name(type);
    }
  }
}

TEST(FoldElementsOrderTest, IntegersFoldInTheirOwnTypeAndWrapAround) {
  ExpectIntegersFold<uint8_t>(DType::kUInt8);
  ExpectIntegersFold<int8_t>(DType::kInt8);
  ExpectIntegersFold<int16_t>(DType::kInt16);
  ExpectIntegersFold<int32_t>(DType::kInt32);
  ExpectIntegersFold<int64_t>(DType::kInt64);
}

TEST(FoldElementsOrderTest, ResultMayReplaceAnInput) {
  std::vector<float> first = {2, 3}, second = {5, 7};
  const std::vector<const void*> inputs = {first.data(), second.data()};
  EXPECT_EQ(FoldElements(Fold::kProduct, inputs, DType::kFloat32, second.data(), 2), 0u);
  EXPECT_EQ(second, (std::vector<float>{10, 21}));
}

}  // namespace
}  // namespace thalweg::fold_elements_test
