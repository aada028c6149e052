#include "kernels/codec/int8/int8.h"

#include <cmath>
#include <limits>

#include "gtest/gtest.h"
#include "hwy/highway.h"
#include "kernels/codec/lossy_reference.h"

namespace thalweg::int8_test {
namespace {

struct Result {
  Bytes bytes;
  Floats decoded;
  Floats residual;
  uint64_t nonfinite = 0;
};

Result Encode(const Floats& values, const Floats& residual, size_t misalignment) {
  Result result;
  result.residual = residual;
  Buffer out(misalignment, MaxEncodedBytes(WireFormat::kInt8, values.size()));
  result.nonfinite = EncodeInt8(values.data(), residual.empty() ? nullptr : result.residual.data(),
                                values.size(), out.Data());
  result.bytes = out.Content();
  result.decoded.resize(values.size());
  DecodeInt8(out.Data(), values.size(), result.decoded.data());
  return result;
}

Result Reference(const Floats& x, const Floats& residual) {
  auto [bytes, decoded] = ReferenceInt8(x);
  Result result{std::move(bytes), std::move(decoded), {}, CountNonFinite(x)};
  if (!residual.empty()) result.residual = ResidualOf(x, result.decoded, residual);
  return result;
}

void ExpectSame(const Result& got, const Result& expected) {
  ASSERT_EQ(got.bytes, expected.bytes);
  ASSERT_EQ(BitsOf(got.decoded), BitsOf(expected.decoded));
  ASSERT_EQ(BitsOf(got.residual), BitsOf(expected.residual));
  ASSERT_EQ(got.nonfinite, expected.nonfinite);
}

// The expected bytes are the worked example of docs/codecs.md.
TEST(Int8Test, BlockIsTheDocumentedBytes) {
  const Result result =
      Encode({125, -125, 1, -1, 0.5f, 1.5f, 2.5f, -2.5f, kNaN, kInfinity, -kInfinity, 0}, {}, 0);
  EXPECT_EQ(result.bytes, BytesOf({0x00, 0x00, 0x80, 0x3f, 0x7d, 0x83, 0x01, 0xff, 0x00, 0x02, 0x02,
                                   0xfe, 0x80, 0x7e, 0x82, 0x00}));
  EXPECT_EQ(BitsOf(result.decoded),
            BitsOf({125, -125, 1, -1, 0, 2, 2, -2, kNaN, kInfinity, -kInfinity, 0}));
  EXPECT_EQ(result.nonfinite, 3u);
}

TEST(Int8Test, EveryBlockHasItsOwnScale) {
  Floats values(257, -250);
  values[256] = 31.25f;
  const Result result = Encode(values, {}, 0);
  Bytes expected(260, std::byte{0x83});
  std::copy_n(BytesOf({0x00, 0x00, 0x00, 0x40}).begin(), 4, expected.begin());
  for (std::byte byte : BytesOf({0x00, 0x00, 0x80, 0x3e, 0x7d})) expected.push_back(byte);
  EXPECT_EQ(result.bytes, expected);
}

TEST(Int8Test, ResidualIsAddedAndLeftBehind) {
  const Result result = Encode({1, 2, 3}, {124, 0.25f, -3.5f}, 0);
  EXPECT_EQ(result.bytes, BytesOf({0x00, 0x00, 0x80, 0x3f, 0x7d, 0x02, 0x00}));
  EXPECT_EQ(result.residual, Floats({0, 0.25f, -0.5f}));
}

TEST(Int8Test, EqualsItsDefinitionForAnySizeAddressAndTarget) {
  std::mt19937_64 random(11);
  for (size_t elems : kLossySizes) {
    for (unsigned special_every : {0u, 40u, 3000u}) {
      const Floats values = RandomFloats(elems, special_every, random);
      const Floats before = RandomFloats(elems, special_every * 2, random);
      const Result plain = Reference(values, {});
      const Result fed_back = Reference(Sum(values, before), before);
      for (int64_t target : hwy::SupportedAndGeneratedTargets()) {
        SCOPED_TRACE(testing::Message() << hwy::TargetName(target) << ", " << elems
                                        << " elements, special " << special_every);
        const ForcedTarget forced(target);
        for (size_t misalignment : {0, 3}) {
          ExpectSame(Encode(values, {}, misalignment), plain);
          ExpectSame(Encode(values, before, misalignment), fed_back);
        }
      }
    }
  }
}

TEST(Int8Test, EveryMagnitudeEqualsTheDefinition) {
  for (int exponent = -150; exponent <= 127; ++exponent) {
    Floats values(256);
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = std::ldexp(1.0f + static_cast<float>(i) / 256, exponent) * (i % 2 == 0 ? 1 : -1);
    }
    const Floats zeros(256);
    ExpectSame(Encode(values, zeros, 0), Reference(values, zeros));
  }
  const Floats largest(256, std::numeric_limits<float>::max());
  const Result result = Encode(largest, Floats(256), 0);
  ExpectSame(result, Reference(largest, Floats(256)));
  EXPECT_EQ(CountNonFinite(result.decoded), 0u);
}

TEST(Int8Test, ElementsTooSmallForAScaleStayInTheResidual) {
  const Floats tiny(256, 0x1p-125f);
  const Result result = Encode(tiny, Floats(256), 0);
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
