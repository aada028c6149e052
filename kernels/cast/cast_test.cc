#include "kernels/cast/cast.h"

#include <cmath>
#include <cstddef>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cast/element.h"
#include "kernels/cast/test_util.h"

namespace thalweg::cast_test {
namespace {

template <class FromElement, class ToElement>
struct Conversion {
  using From = FromElement;
  using To = ToElement;
};

template <class From, class To>
std::vector<std::byte> ScalarCast(const std::vector<std::byte>& in) {
  const size_t elems = in.size() / sizeof(typename From::Bits);
  std::vector<std::byte> out(elems * sizeof(typename To::Bits));
  for (size_t i = 0; i < elems; ++i) {
    StoreBits<To>(To::Narrow(From::Widen(LoadBits<From>(in.data(), i))), out.data(), i);
  }
  return out;
}

// Returns fp32 patterns with every upper half, and lower halves around the places where rounding
// changes.
std::vector<std::byte> Fp32Patterns() {
  std::vector<std::byte> result;
  for (uint32_t upper = 0; upper <= 0xffff; ++upper) {
    for (uint32_t lower : {0x0000u, 0x0001u, 0x1000u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      const uint32_t bits = (upper << 16) | lower;
      const auto* bytes = reinterpret_cast<const std::byte*>(&bits);
      result.insert(result.end(), bytes, bytes + sizeof(bits));
    }
  }
  return result;
}

std::vector<std::byte> AllPatterns16() {
  std::vector<std::byte> result(2 * 65536);
  for (uint32_t bits = 0; bits <= 0xffff; ++bits) {
    StoreBits<Fp16>(static_cast<uint16_t>(bits), result.data(), bits);
  }
  return result;
}

template <class Conversion>
class CastTest : public ::testing::Test {
 protected:
  using From = typename Conversion::From;
  using To = typename Conversion::To;

  static std::vector<std::byte> RunCast(const std::vector<std::byte>& in, size_t in_misalignment,
                                        size_t out_misalignment) {
    const size_t elems = in.size() / sizeof(typename From::Bits);
    Buffer from(in_misalignment, in);
    Buffer to(out_misalignment, elems * sizeof(typename To::Bits));
    Cast(kTypeOf<From>, from.Data(), kTypeOf<To>, to.Data(), elems);
    return to.Content();
  }
};
using Conversions = ::testing::Types<Conversion<Fp32, Fp16>, Conversion<Fp32, BFloat16>,
                                     Conversion<Fp16, Fp32>, Conversion<BFloat16, Fp32>>;
TYPED_TEST_SUITE(CastTest, Conversions);

TYPED_TEST(CastTest, EveryTargetGivesTheScalarBits) {
  using From = typename TypeParam::From;
  using To = typename TypeParam::To;
  const auto patterns = sizeof(typename From::Bits) == 4 ? Fp32Patterns() : AllPatterns16();
  const auto expected = ScalarCast<From, To>(patterns);
  for (int64_t target : hwy::SupportedAndGeneratedTargets()) {
    const ForcedTarget forced(target);
    EXPECT_TRUE(this->RunCast(patterns, 0, 0) == expected) << hwy::TargetName(target);
  }
}

TYPED_TEST(CastTest, AnySizeAtAnyAddressGivesTheScalarBits) {
  using From = typename TypeParam::From;
  using To = typename TypeParam::To;
  std::mt19937_64 random(2);
  for (size_t elems : TestSizes()) {
    const auto in = RandomElements<From>(elems, 4, random);
    const auto expected = ScalarCast<From, To>(in);
    for (int64_t target : hwy::SupportedAndGeneratedTargets()) {
      const ForcedTarget forced(target);
      for (size_t a : kMisalignments) {
        for (size_t b : kMisalignments) {
          ASSERT_TRUE(this->RunCast(in, a, b) == expected)
              << hwy::TargetName(target) << ", " << elems << " elements at " << a << " and " << b;
        }
      }
    }
  }
}

template <class From>
class WidenScaledTest : public ::testing::Test {
 protected:
  // Compares the results bit for bit with the product of each element; returns whether all are
  // finite.
  static bool Run(const std::vector<std::byte>& in, float factor, size_t a, size_t b) {
    const size_t elems = in.size() / sizeof(typename From::Bits);
    std::vector<std::byte> expected = ScalarCast<From, Fp32>(in);
    for (size_t i = 0; i < elems; ++i) {
      const float value = Fp32::Widen(LoadBits<Fp32>(expected.data(), i));
      StoreBits<Fp32>(Fp32::Narrow(value * factor), expected.data(), i);
    }
    Buffer from(a, in);
    Buffer to(b, elems * sizeof(float));
    const bool is_finite = WidenScaled(kTypeOf<From>, from.Data(), factor, to.Data(), elems);
    EXPECT_TRUE(to.Content() == expected) << elems << " elements at " << a << " and " << b;
    return is_finite;
  }
};
using HalfTypes = ::testing::Types<Fp16, BFloat16>;
TYPED_TEST_SUITE(WidenScaledTest, HalfTypes);

TYPED_TEST(WidenScaledTest, EveryTargetMultipliesAllPatternsAndSeesTheInfinite) {
  for (int64_t target : hwy::SupportedAndGeneratedTargets()) {
    const ForcedTarget forced(target);
    EXPECT_FALSE(this->Run(AllPatterns16(), 0x1p-14f, 0, 0)) << hwy::TargetName(target);
  }
}

TYPED_TEST(WidenScaledTest, OneElementThatIsNotFiniteIsSeenAnywhere) {
  for (int64_t target : hwy::SupportedAndGeneratedTargets()) {
    const ForcedTarget forced(target);
    for (size_t elems : {0, 1, 7, 16, 33}) {
      std::vector<std::byte> in(elems * 2);
      for (size_t i = 0; i < elems; ++i) {
        StoreBits<TypeParam>(TypeParam::Narrow(static_cast<float>(i) - 3), in.data(), i);
      }
      EXPECT_TRUE(this->Run(in, 3, 1, 3));
      for (size_t i = 0; i < elems; ++i) {
        for (const float bad : {INFINITY, -INFINITY, NAN}) {
          auto with_bad = in;
          StoreBits<TypeParam>(TypeParam::Narrow(bad), with_bad.data(), i);
          EXPECT_FALSE(this->Run(with_bad, 3, 1, 3)) << elems << " elements, " << i;
        }
      }
    }
  }
}

TEST(CastCopyTest, EqualTypesAreCopiedByteForByteAtAnyAddress) {
  std::mt19937_64 random(10);
  for (size_t elems : TestSizes()) {
    const auto in = RandomElements<Fp64>(elems, 4, random);
    for (int64_t target : hwy::SupportedAndGeneratedTargets()) {
      const ForcedTarget forced(target);
      for (DType type : {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat64}) {
        Buffer from(3, in);
        Buffer to(1, in.size());
        Cast(type, from.Data(), type, to.Data(), in.size() / SizeOf(type));
        ASSERT_TRUE(to.Content() == in) << elems << " " << Name(type);
      }
    }
  }
}

TEST(CastCopyTest, OverlappingCopyMovesTheBytes) {
  for (size_t from : {0, 1, 2}) {
    std::vector<float> values(1000);
    std::iota(values.begin(), values.end(), 0.0f);
    std::vector<float> expected = values;
    for (size_t i = 0; i < 998; ++i) expected[i + 1] = values[i + from];
    Cast(DType::kFloat32, values.data() + from, DType::kFloat32, values.data() + 1, 998);
    EXPECT_EQ(values, expected) << from;
  }
}

TEST(CastCopyTest, NoElementsNeedNoMemory) {
  Cast(DType::kFloat32, nullptr, DType::kFloat16, nullptr, 0);
  Cast(DType::kFloat32, nullptr, DType::kFloat32, nullptr, 0);
}

}  // namespace
}  // namespace thalweg::cast_test
