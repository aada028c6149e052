#include "kernels/codec/lossy.h"

#include <cmath>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cast/cast.h"
#include "kernels/codec/lossy_test_util.h"

namespace thalweg::lossy_test {
namespace {

using ::testing::HasSubstr;

constexpr double kRatio = 0.05;

Bytes Encode(WireFormat format, const Floats& values, Floats* residual) {
  Bytes bytes(MaxEncodedBytes(format, values.size()));
  const Encoded encoded =
      EncodeLossy(format, kRatio, values.data(), residual == nullptr ? nullptr : residual->data(),
                  values.size(), bytes.data());
  EXPECT_LE(encoded.bytes, bytes.size());
  if (HasFixedSize(format)) {
    EXPECT_EQ(encoded.bytes, bytes.size());
  }
  bytes.resize(encoded.bytes);
  return bytes;
}

Floats Decode(WireFormat format, const Payload& payload, size_t elems) {
  Floats decoded(elems, -77);
  const absl::Status status = DecodeLossy(payload, format, DType::kFloat32, elems, decoded.data());
  EXPECT_TRUE(status.ok()) << status;
  return decoded;
}

absl::Status TryDecode(WireFormat format, const Bytes& bytes, uint64_t elems) {
  Floats out(elems);
  return DecodeLossy(Split(bytes, {}), format, DType::kFloat32, elems, out.data());
}

class LossyTest : public ::testing::TestWithParam<WireFormat> {};
INSTANTIATE_TEST_SUITE_P(Formats, LossyTest, ::testing::ValuesIn(kLossyFormats),
                         [](const auto& info) { return std::string(Name(info.param)); });

TEST_P(LossyTest, TheResidualIsExactlyWhatWasLost) {
  std::mt19937_64 random(21);
  for (size_t elems : kLossySizes) {
    const Floats values = RandomFloats(elems, 0, random);
    const Floats before = RandomFloats(elems, 0, random);
    Floats residual = before;
    const Bytes bytes = Encode(GetParam(), values, &residual);
    const Floats decoded = Decode(GetParam(), Split(bytes, {}), elems);
    EXPECT_EQ(BitsOf(residual), BitsOf(ResidualOf(Sum(values, before), decoded, before)));
  }
}

TEST_P(LossyTest, FiniteElementsThatA16BitTypeMakesInfiniteAreCounted) {
  std::mt19937_64 random(25);
  for (const DType bucket : {DType::kFloat16, DType::kBFloat16, DType::kFloat32}) {
    const float large = bucket == DType::kFloat16 ? 7e4f : 3.4e38f;
    for (const size_t elems : kLossySizes) {
      Floats values = RandomFloats(elems, 0, random);
      for (size_t i = 0; i < elems; ++i) {
        if (i % 300 == 7) values[i] = i % 2 == 0 ? large : -large;
        if (i % 700 == 9) values[i] = kInfinity;
      }
      const Bytes bytes = Encode(GetParam(), values, nullptr);
      const Payload payload = Split(bytes, {1, 130});
      uint64_t expected = 0;
      for (const float value : Decode(GetParam(), payload, elems)) {
        Bytes narrow(SizeOf(bucket));
        Cast(DType::kFloat32, &value, bucket, narrow.data(), 1);
        float wide = value;
        if (bucket != DType::kFloat32) Cast(bucket, narrow.data(), DType::kFloat32, &wide, 1);
        if (std::isfinite(value) && !std::isfinite(wide)) ++expected;
      }
      EXPECT_EQ(CountOverflow(payload, GetParam(), bucket, elems), expected);
      if (bucket == DType::kFloat16 && elems > 300 && GetParam() != WireFormat::kOneBit) {
        EXPECT_GT(expected, 0u);
      }
    }
  }
}

// Where residuals begin decides how they are stored.
TEST_P(LossyTest, ResidualsThatLieApartAreThoseOfOnePlaceWhereverTheyBegin) {
  std::mt19937_64 random(24);
  constexpr size_t kLine = 64 / sizeof(float);
  for (size_t elems : kLossySizes) {
    for (unsigned special_every : {0u, 50u}) {  // such as NaN
      const Floats values = RandomFloats(elems, special_every, random);
      const Floats last = RandomFloats(elems, 0, random);
      Floats expected = last;
      const Bytes bytes = Encode(GetParam(), values, &expected);
      Floats room(elems + 3 * kLine, -77);
      const size_t line = kLine - reinterpret_cast<uintptr_t>(room.data()) / sizeof(float) % kLine;
      for (size_t begin : {line, line + 1, line + 8}) {
        std::fill(room.begin(), room.end(), -77);
        Bytes apart(MaxEncodedBytes(GetParam(), elems));
        apart.resize(EncodeLossy(GetParam(), kRatio, values.data(),
                                 {last.data(), room.data() + begin}, elems, apart.data())
                         .bytes);
        EXPECT_EQ(apart, bytes);
        const auto next = room.begin() + static_cast<ptrdiff_t>(begin);
        EXPECT_EQ(BitsOf(Floats(next, next + static_cast<ptrdiff_t>(elems))), BitsOf(expected));
        EXPECT_EQ(room[begin - 1], -77);
        EXPECT_EQ(room[begin + elems], -77);
      }
    }
  }
}

// The values decoded over many rounds and the final residual add up to what was to be sent.
TEST_P(LossyTest, NothingIsLostOverManyRounds) {
  const size_t elems = 3000;
  const int rounds = 100;
  std::mt19937_64 random(22);
  Floats residual(elems);
  std::vector<double> sent(elems);
  std::vector<double> arrived(elems);
  std::vector<double> roundings(elems);
  for (int round = 0; round < rounds; ++round) {
    const Floats values = RandomFloats(elems, 0, random);
    const Floats x = Sum(values, residual);
    const Bytes bytes = Encode(GetParam(), values, &residual);
    const Floats decoded = Decode(GetParam(), Split(bytes, {}), elems);
    for (size_t i = 0; i < elems; ++i) {
      sent[i] += values[i];
      arrived[i] += decoded[i];
      // x and the residual are rounded once each.
      roundings[i] += std::ldexp(std::fabs(x[i]) + std::fabs(residual[i]), -24);
    }
  }
  for (size_t i = 0; i < elems; ++i) {
    // Doubles add less than 2^-50 of the sums.
    ASSERT_NEAR(arrived[i] + residual[i], sent[i], roundings[i] * 1.001 + 1e-12) << i;
    // About √100 is sent to every element; what is missing stays far below the sum of the
    // magnitudes.
    ASSERT_LT(std::fabs(residual[i]), 60) << i;
  }
}

TEST_P(LossyTest, PiecesMayEndAnywhere) {
  std::mt19937_64 random(23);
  for (size_t elems : {10, 1030}) {
    const Bytes bytes = Encode(GetParam(), RandomFloats(elems, 0, random), nullptr);
    const Floats expected = Decode(GetParam(), Split(bytes, {}), elems);
    for (size_t cut = 0; cut <= bytes.size(); ++cut) {
      EXPECT_EQ(Decode(GetParam(), Split(bytes, {cut}), elems), expected) << cut;
    }
    EXPECT_EQ(Decode(GetParam(), Split(bytes, std::vector<size_t>(bytes.size(), 1)), elems),
              expected);
  }
}

TEST_P(LossyTest, HalfTypesAreTheRoundedFloats) {
  std::mt19937_64 random(25);
  for (DType bucket : {DType::kFloat16, DType::kBFloat16}) {
    for (size_t elems : kLossySizes) {
      const Bytes bytes = Encode(GetParam(), RandomFloats(elems, 50, random), nullptr);
      const Payload payload = Split(bytes, RandomLengths(bytes.size(), 700, random));
      const Floats floats = Decode(GetParam(), payload, elems);
      Bytes expected(2 * elems);
      Cast(DType::kFloat32, floats.data(), bucket, expected.data(), elems);
      Buffer out(1, Bytes(2 * elems, std::byte{0x77}));
      ASSERT_TRUE(DecodeLossy(payload, GetParam(), bucket, elems, out.Data()).ok());
      EXPECT_EQ(out.Content(), expected) << Name(bucket) << ", " << elems;
    }
  }
}

TEST_P(LossyTest, EveryTruncationAndAnyByteTooManyIsRefused) {
  std::mt19937_64 random(26);
  for (size_t elems : {0, 1, 9, 300, 1030}) {
    Bytes bytes = Encode(GetParam(), RandomFloats(elems, 0, random), nullptr);
    for (size_t size = 0; size < bytes.size(); ++size) {
      const Bytes less(bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(size));
      EXPECT_TRUE(absl::IsInvalidArgument(TryDecode(GetParam(), less, elems))) << size;
    }
    bytes.push_back(std::byte{0});
    const absl::Status status = TryDecode(GetParam(), bytes, elems);
    EXPECT_TRUE(absl::IsInvalidArgument(status));
    EXPECT_THAT(std::string(status.message()), HasSubstr("got " + std::to_string(bytes.size())));
  }
}

TEST_P(LossyTest, ChunksTooLongForTheFormatAreRefused) {
  for (uint64_t elems : {kMaxLossyElems + 1, uint64_t{1} << 63, ~uint64_t{0}}) {
    const absl::Status status = DecodeLossy(Payload(), GetParam(), DType::kFloat32, elems, nullptr);
    EXPECT_TRUE(absl::IsInvalidArgument(status));
    EXPECT_THAT(std::string(status.message()), HasSubstr("at most 4294967295 elements"));
  }
}

Bytes Mutate(Bytes bytes, std::mt19937_64& random) {
  for (uint64_t i = 0, n = 1 + random() % 3; i < n && !bytes.empty(); ++i) {
    const auto at = bytes.begin() + static_cast<ptrdiff_t>(random() % bytes.size());
    switch (random() % 5) {
      case 0:
        *at ^= std::byte{1} << (random() % 8);
        break;
      case 1:
        bytes.erase(at, bytes.end());
        break;
      case 2:
        bytes.insert(at, 1 + random() % 5, static_cast<std::byte>(random()));
        break;
      case 3:
        bytes.erase(at);
        break;
      default:
        *at = std::byte{0xff};
    }
  }
  return bytes;
}

// Every accepted payload decodes to elements that are numbers, infinite or NaN, within the chunk:
// AddressSanitizer checks that.
TEST_P(LossyTest, RandomAndMutatedPayloadsAreRefusedOrDecode) {
  std::mt19937_64 random(27);
  int accepted = 0;
  for (int i = 0; i < 20'000; ++i) {
    const uint64_t elems = random() % 300;
    const Bytes good = Encode(GetParam(), RandomFloats(elems, 20, random), nullptr);
    Bytes bytes = Mutate(good, random);
    if (i % 4 == 0) {
      bytes.resize(good.size());
      for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
    }
    const Payload payload = Split(bytes, RandomLengths(bytes.size(), 700, random));
    Floats out(elems);
    const absl::Status status =
        DecodeLossy(payload, GetParam(), DType::kFloat32, elems, out.data());
    EXPECT_TRUE(status.ok() || absl::IsInvalidArgument(status));
    accepted += status.ok() ? 1 : 0;
    const std::vector<Payload> contributions = {payload, Split(good, {})};
    Bytes folded(MaxFoldedBytes(contributions, GetParam(), elems));
    const auto result = FoldLossy(contributions, std::vector<uint32_t>{1, 1}, GetParam(), elems,
                                  nullptr, folded.data());
    EXPECT_EQ(result.ok(), status.ok());
  }
  EXPECT_GT(accepted, 1000);  // otherwise the mutations are too strong to test anything
}

TEST(LossyFormatTest, OtherFormatsAndBucketTypesAreRefused) {
  for (int value : {0, 1, 2, 3, 4, 15, 19, 255}) {
    const auto format = static_cast<WireFormat>(value);
    const absl::Status status = DecodeLossy(Payload(), format, DType::kFloat32, 0, nullptr);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << value;
    EXPECT_THAT(std::string(status.message()), HasSubstr("int8, onebit, topk"));
  }
  for (DType bucket : {DType::kFloat64, static_cast<DType>(10)}) {
    const absl::Status status = DecodeLossy(Payload(), WireFormat::kInt8, bucket, 0, nullptr);
    EXPECT_THAT(std::string(status.message()), HasSubstr("never crosses the network as int8"));
  }
}

TEST(LossyFormatTest, BlocksCutAtMultiplesOf1024MayBeEncodedApart) {
  std::mt19937_64 random(28);
  const Floats values = RandomFloats(4000, 0, random);
  const Floats head(values.begin(), values.begin() + 2048);
  const Floats tail(values.begin() + 2048, values.end());
  for (WireFormat format : {WireFormat::kInt8, WireFormat::kOneBit}) {
    Bytes apart = Encode(format, head, nullptr);
    for (std::byte byte : Encode(format, tail, nullptr)) apart.push_back(byte);
    EXPECT_EQ(apart, Encode(format, values, nullptr)) << Name(format);
  }
}

}  // namespace
}  // namespace thalweg::lossy_test
