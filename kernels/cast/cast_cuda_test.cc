#include "kernels/cast/cast_cuda.h"

#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cast/cast.h"
#include "kernels/cast/element.h"
#include "kernels/cast/test_util.h"
#include "kernels/launch/test_device.h"

namespace thalweg::cast_cuda_test {
namespace {

using ::testing::HasSubstr;
using Bytes = std::vector<std::byte>;

Bytes OnCpu(DType from, const Bytes& in, DType to) {
  const size_t elems = in.size() / SizeOf(from);
  Bytes out(elems * SizeOf(to));
  Cast(from, in.data(), to, out.data(), elems);
  return out;
}

// Runs the cast on arrays that begin that many elements after a multiple of 256 bytes.
Bytes OnDevice(DType from, const Bytes& in, DType to, size_t in_shift, size_t out_shift) {
  const size_t elems = in.size() / SizeOf(from);
  const DeviceBuffer input(in, in_shift * SizeOf(from));
  const DeviceBuffer output(elems * SizeOf(to), out_shift * SizeOf(to));
  const absl::Status status = CastOnDevice(nullptr, from, input.Data(), to, output.Data(), elems);
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_TRUE(FinishDevice().ok());
  return output.Content();
}

template <class FromElement, class ToElement>
struct Conversion {
  using From = FromElement;
  using To = ToElement;
};

template <class Conversion>
class CastOnDeviceTest : public DeviceTest {};
using Conversions = ::testing::Types<Conversion<Fp32, Fp16>, Conversion<Fp32, BFloat16>,
                                     Conversion<Fp16, Fp32>, Conversion<BFloat16, Fp32>>;
TYPED_TEST_SUITE(CastOnDeviceTest, Conversions);

TYPED_TEST(CastOnDeviceTest, EveryPatternEqualsTheCpu) {
  using From = typename TypeParam::From;
  Bytes patterns;
  // Returns all patterns of 16 bits; of 32 bits those around the places where rounding changes, in
  // every exponent.
  for (uint32_t upper = 0; upper <= 0xffff; upper += sizeof(typename From::Bits) == 2 ? 1 : 9) {
    for (uint32_t lower : {0x0000u, 0x0001u, 0x1000u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      if (sizeof(typename From::Bits) == 2 && lower != 0) continue;
      const auto bits = static_cast<typename From::Bits>(
          sizeof(typename From::Bits) == 2 ? upper : (upper << 16 | lower));
      const auto* bytes = reinterpret_cast<const std::byte*>(&bits);
      patterns.insert(patterns.end(), bytes, bytes + sizeof(bits));
    }
  }
  constexpr DType kFrom = kTypeOf<From>;
  constexpr DType kTo = kTypeOf<typename TypeParam::To>;
  EXPECT_TRUE(OnDevice(kFrom, patterns, kTo, 0, 0) == OnCpu(kFrom, patterns, kTo));
}

TYPED_TEST(CastOnDeviceTest, AnySizeAtAnyAddressEqualsTheCpu) {
  constexpr DType kFrom = kTypeOf<typename TypeParam::From>;
  constexpr DType kTo = kTypeOf<typename TypeParam::To>;
  std::mt19937_64 random(41);
  for (size_t elems : {0, 1, 7, 8, 9, 22, 23, 1000, 4095, 4096, 4105, 8300}) {
    const Bytes in = RandomElements<typename TypeParam::From>(elems, 4, random);
    const Bytes expected = OnCpu(kFrom, in, kTo);
    for (auto [in_shift, out_shift] : {std::pair{0, 0}, {3, 3}, {5, 1}, {1, 5}, {0, 1}, {2, 0}}) {
      ASSERT_TRUE(OnDevice(kFrom, in, kTo, static_cast<size_t>(in_shift),
                           static_cast<size_t>(out_shift)) == expected)
          << elems << " elements, shifted by " << in_shift << " and " << out_shift;
    }
  }
}

class CopyOnDeviceTest : public DeviceTest {};

TEST_F(CopyOnDeviceTest, EqualTypesAreCopied) {
  std::mt19937_64 random(42);
  const Bytes in = RandomElements<Fp64>(500, 4, random);
  for (DType type : {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat64}) {
    EXPECT_TRUE(OnDevice(type, in, type, 1, 0) == in) << Name(type);
  }
}

TEST(CastOnDeviceArgumentsTest, OtherPairsOfTypesAreRefused) {
  for (auto [from, to] : {std::pair{DType::kFloat32, DType::kFloat64},
                          {DType::kFloat16, DType::kBFloat16},
                          {static_cast<DType>(10), static_cast<DType>(10)}}) {
    const absl::Status status = CastOnDevice(nullptr, from, nullptr, to, nullptr, 0);
    EXPECT_TRUE(absl::IsInvalidArgument(status));
    EXPECT_THAT(std::string(status.message()), HasSubstr(Name(to)));
  }
}

}  // namespace
}  // namespace thalweg::cast_cuda_test
