#include "kernels/codec/int8/int8.h"

#include <cmath>
#include <limits>

#include "gtest/gtest.h"
#include "hwy/highway.h"
#include "kernels/codec/block_test_util.h"

namespace thalweg::int8_test {
namespace {

constexpr BlockFormat kInt8{WireFormat::kInt8, EncodeInt8, DecodeInt8, ReferenceInt8};

// The expected bytes are the worked example of docs/codecs.md.
TEST(Int8Test, BlockIsTheDocumentedBytes) {
  const BlockResult result = kInt8.Encode(
      {125, -125, 1, -1, 0.5f, 1.5f, 2.5f, -2.5f, kNaN, kInfinity, -kInfinity, 0}, {}, 0);
  EXPECT_EQ(result.bytes, BytesOf({0x00, 0x00, 0x80, 0x3f, 0x7d, 0x83, 0x01, 0xff, 0x00, 0x02, 0x02,
                                   0xfe, 0x80, 0x7e, 0x82, 0x00}));
  EXPECT_EQ(BitsOf(result.decoded),
            BitsOf({125, -125, 1, -1, 0, 2, 2, -2, kNaN, kInfinity, -kInfinity, 0}));
  EXPECT_EQ(result.nonfinite, 3u);
}

TEST(Int8Test, EveryBlockHasItsOwnScale) {
  Floats values(257, -250);
  values[256] = 31.25f;
  const BlockResult result = kInt8.Encode(values, {}, 0);
  Bytes expected(260, std::byte{0x83});
  std::copy_n(BytesOf({0x00, 0x00, 0x00, 0x40}).begin(), 4, expected.begin());
  for (std::byte byte : BytesOf({0x00, 0x00, 0x80, 0x3e, 0x7d})) expected.push_back(byte);
  EXPECT_EQ(result.bytes, expected);
}

TEST(Int8Test, ResidualIsAddedAndLeftBehind) {
  const BlockResult result = kInt8.Encode({1, 2, 3}, {124, 0.25f, -3.5f}, 0);
  EXPECT_EQ(result.bytes, BytesOf({0x00, 0x00, 0x80, 0x3f, 0x7d, 0x02, 0x00}));
  EXPECT_EQ(result.residual, Floats({0, 0.25f, -0.5f}));
}

TEST(Int8Test, EqualsItsDefinitionForAnySizeAddressAndTarget) {
  ExpectDefinition(kInt8, std::mt19937_64(11));
}

TEST(Int8Test, EveryMagnitudeEqualsTheDefinition) {
  for (int exponent = -150; exponent <= 127; ++exponent) {
    Floats values(256);
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = std::ldexp(1.0f + static_cast<float>(i) / 256, exponent) * (i % 2 == 0 ? 1 : -1);
    }
    const Floats zeros(256);
    ExpectSame(kInt8.Encode(values, zeros, 0), kInt8.Reference(values, zeros));
  }
  const Floats largest(256, std::numeric_limits<float>::max());
  const BlockResult result = kInt8.Encode(largest, Floats(256), 0);
  ExpectSame(result, kInt8.Reference(largest, Floats(256)));
  EXPECT_EQ(CountNonFinite(result.decoded), 0u);
}

TEST(Int8Test, ElementsTooSmallForAScaleStayInTheResidual) {
  const Floats tiny(256, 0x1p-125f);
  const BlockResult result = kInt8.Encode(tiny, Floats(256), 0);
  EXPECT_EQ(result.decoded, Floats(256));
  EXPECT_EQ(result.residual, tiny);
}

TEST(Int8Test, AnyBytesDecodeAsDefined) {
  std::mt19937_64 random(12);
  const float scales[] = {1, -0.1f, 0, -0.0f, 0x1p-149f, 3e38f, kInfinity, -kInfinity, kNaN};
  for (size_t elems : {10, 256, 300}) {
    for (float scale : scales) {
      for (int repeat = 0; repeat < 8; ++repeat) {
        Buffer in(1, MaxEncodedBytes(WireFormat::kInt8, elems));
        Floats expected(elems);
        for (size_t i = 0; i < elems; ++i) {
          // Half of the blocks have no special codes.
          const int code = static_cast<int>(random() % 256) - 128;
          const int limited = repeat % 2 == 0 ? code : code % 125;
          std::memcpy(in.Data() + i / 256 * 260, &scale, 4);
          in.Data()[i + 4 * (i / 256 + 1)] = static_cast<std::byte>(limited);
          expected[i] = ReferenceDecodeInt8(limited, scale);
        }
        for (int64_t target : hwy::SupportedAndGeneratedTargets()) {
          const ForcedTarget forced(target);
          Floats got(elems);
          DecodeInt8(in.Data(), elems, got.data());
          ASSERT_EQ(BitsOf(got), BitsOf(expected)) << hwy::TargetName(target) << ", " << scale;
        }
      }
    }
  }
}

}  // namespace
}  // namespace thalweg::int8_test
