#include "kernels/codec/onebit/onebit.h"

#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "hwy/highway.h"
#include "kernels/codec/block_test_util.h"

namespace thalweg::onebit_test {
namespace {

constexpr BlockFormat kOneBit{WireFormat::kOneBit, EncodeOneBit, DecodeOneBit, ReferenceOneBit};

// The expected bytes are the worked example of docs/codecs.md.
TEST(OneBitTest, BlockIsTheDocumentedBytes) {
  const BlockResult result =
      kOneBit.Encode({1, -1, 3, -3, 2, -2, 0, -0.0f, -4, 4, -2, 2, 1, -1, 3, -3}, {}, 0);
  EXPECT_EQ(result.bytes, BytesOf({0x00, 0x00, 0x00, 0x40, 0x2a, 0xa5}));
  EXPECT_EQ(result.decoded, Floats({2, -2, 2, -2, 2, -2, 2, 2, -2, 2, -2, 2, 2, -2, 2, -2}));
}

// This is the second example: one element of a whole block, whose rotation has equal magnitudes.
TEST(OneBitTest, WholeBlockIsTheDocumentedBytes) {
  const std::pair<size_t, int> cases[] = {{0, 0xff}, {1, 0x55}};
  for (auto [at, signs] : cases) {
    Floats values(1024);
    values[at] = 1024;
    Bytes expected = BytesOf({0x00, 0x00, 0x80, 0x3f});
    expected.resize(132, static_cast<std::byte>(signs));
    const BlockResult result = kOneBit.Encode(values, Floats(1024), 0);
    EXPECT_EQ(result.bytes, expected);
    EXPECT_EQ(result.decoded, values);
    EXPECT_EQ(result.residual, Floats(1024));
  }
}

TEST(OneBitTest, EveryBlockHasItsOwnScale) {
  Floats values(1026);
  values[0] = 1024;
  values[1024] = 3;
  values[1025] = -1;
  Bytes expected = BytesOf({0x00, 0x00, 0x80, 0x3f});
  expected.resize(132, std::byte{0xff});
  for (std::byte byte : BytesOf({0x00, 0x00, 0x00, 0x40, 0x02})) expected.push_back(byte);
  EXPECT_EQ(kOneBit.Encode(values, {}, 0).bytes, expected);
}

// The signs keep 2/π of a block's energy, however it is distributed. The bound is probabilistic: a
// rotated element is a sum of up to 1024 others with signs that were drawn once. A few large
// elements are the hard case: the signs and the mean magnitude of the unrotated block keep only
// 1/100 here.
TEST(OneBitTest, MostOfABlocksEnergyCrosses) {
  std::mt19937_64 random(16);
  for (size_t large : {10, 100, 1024}) {
    Floats values(1024);
    for (size_t i = 0; i < large; ++i) values[i * (1024 / large)] = random() % 2 == 0 ? 1 : -1;
    const BlockResult result = kOneBit.Encode(values, Floats(1024), 0);
    double lost = 0;
    for (float value : result.residual) lost += double{value} * value;
    EXPECT_LT(lost, 0.45 * static_cast<double>(large)) << large << " elements of 1024";
  }
}

TEST(OneBitTest, ResidualIsAddedAndLeftBehind) {
  const BlockResult result = kOneBit.Encode({1, 2}, {2, -3}, 0);
  EXPECT_EQ(result.bytes, BytesOf({0x00, 0x00, 0x00, 0x40, 0x02}));
  EXPECT_EQ(result.residual, Floats({1, 1}));
}

TEST(OneBitTest, ANonFiniteElementMakesItsBlockNaNAndKeepsTheResidual) {
  for (float bad : {kNaN, kInfinity, -kInfinity}) {
    for (size_t at : {0, 500, 1023, 1024, 1500}) {
      Floats values(1501, 1);
      const Floats before(1501, -2);
      values[at] = bad;
      const BlockResult result = kOneBit.Encode(values, before, 0);
      EXPECT_EQ(result.nonfinite, 1u);
      for (size_t i = 0; i < values.size(); ++i) {
        const bool same_block = i / 1024 == at / 1024;
        if (!same_block) {
          ASSERT_TRUE(std::isfinite(result.decoded[i]));
          ASSERT_EQ(result.residual[i], -1 - result.decoded[i]) << i;
          continue;
        }
        ASSERT_EQ(BitCast<uint32_t>(result.decoded[i]), Fp32::kNan);
        ASSERT_EQ(result.residual[i], -2) << i;
      }
    }
  }
}

TEST(OneBitTest, EqualsItsDefinitionForAnySizeAddressAndTarget) {
  ExpectDefinition(kOneBit, std::mt19937_64(13));
}

TEST(OneBitTest, ScaleOfAShortBlockIsTheMeanMagnitude) {
  std::mt19937_64 random(14);
  for (size_t elems : {1, 2, 3, 100, 1000, 1023}) {
    const Floats values = RandomFloats(elems, 0, random);
    double sum = 0;
    for (float value : values) sum += std::fabs(double{value});
    const double mean = sum / static_cast<double>(elems);
    // 64 additions into each of the 16 sums, 4 that join them and the division are each off by
    // 2^-24 of a number that is not larger than the total.
    EXPECT_NEAR(std::fabs(kOneBit.Encode(values, {}, 0).decoded[0]), mean,
                70 * std::ldexp(mean, -24));
  }
}

TEST(OneBitTest, TheLargestFloatsHaveAScale) {
  for (size_t elems : {1, 3, 1000, 1023, 1024}) {
    const Floats values(elems, std::numeric_limits<float>::max());
    const BlockResult result = kOneBit.Encode(values, Floats(elems), 0);
    EXPECT_EQ(CountNonFinite(result.decoded), 0u) << elems;
    ExpectSame(result, kOneBit.Reference(values, Floats(elems)));
  }
}

Floats Decoded(float scale, const std::byte* signs, size_t elems) {
  if (!std::isfinite(scale)) return Floats(elems, kNaN);
  std::vector<bool> negative(elems);
  for (size_t i = 0; i < elems; ++i) {
    negative[i] = (signs[i / 8] >> (i % 8) & std::byte{1}) != std::byte{0};
  }
  if (elems == 1024) return ReferenceRotateBack(scale, negative);
  Floats decoded;
  for (bool minus : negative) decoded.push_back(minus ? -scale : scale);
  return decoded;
}

TEST(OneBitTest, AnyBytesDecodeAsDefined) {
  std::mt19937_64 random(15);
  for (size_t elems : {10, 1024, 1100}) {
    for (float scale : {1.0f, -1.0f, -0.0f, 0x1p-149f, kInfinity, -kInfinity, kNaN}) {
      Buffer in(1, MaxEncodedBytes(WireFormat::kOneBit, elems));
      for (std::byte& byte : std::span(in.Data(), in.Content().size())) {
        byte = static_cast<std::byte>(random());
      }
      Floats expected;
      for (size_t begin = 0; begin < elems; begin += 1024) {
        std::byte* const block = in.Data() + begin / 1024 * 132;
        std::memcpy(block, &scale, 4);
        const Floats decoded = Decoded(scale, block + 4, std::min<size_t>(elems - begin, 1024));
        expected.insert(expected.end(), decoded.begin(), decoded.end());
      }
      for (int64_t target : hwy::SupportedAndGeneratedTargets()) {
        const ForcedTarget forced(target);
        Floats got(elems);
        DecodeOneBit(in.Data(), elems, got.data());
        ASSERT_EQ(BitsOf(got), BitsOf(expected)) << hwy::TargetName(target) << ", " << scale;
      }
    }
  }
}

}  // namespace
}  // namespace thalweg::onebit_test
