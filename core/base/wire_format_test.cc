#include "core/base/wire_format.h"

#include "gtest/gtest.h"

namespace thalweg::wire_format_test {
namespace {

constexpr WireFormat kDense[] = {
    WireFormat::kFloat32,    WireFormat::kFloat16,    WireFormat::kBFloat16,
    WireFormat::kFloat64,    WireFormat::kDenseUInt8, WireFormat::kDenseInt8,
    WireFormat::kDenseInt16, WireFormat::kDenseInt32, WireFormat::kDenseInt64};
constexpr WireFormat kLossy[] = {WireFormat::kInt8, WireFormat::kOneBit, WireFormat::kTopK};

TEST(WireFormatTest, OnlyTheseValuesAreValid) {
  for (int value = 0; value < 256; ++value) {
    const bool dense = value >= 1 && value <= 9;
    const bool lossy = value >= 16 && value <= 18;
    EXPECT_EQ(IsDense(static_cast<WireFormat>(value)), dense) << value;
    EXPECT_EQ(IsValid(static_cast<WireFormat>(value)), dense || lossy) << value;
  }
}

TEST(WireFormatTest, DenseFormatsAreTheElementTypes) {
  for (WireFormat format : kDense) {
    EXPECT_EQ(FormatOf(DTypeOf(format)), format);
    EXPECT_STREQ(Name(format), Name(DTypeOf(format)));
    EXPECT_EQ(MaxEncodedBytes(format, 1000), 1000 * SizeOf(DTypeOf(format)));
    EXPECT_TRUE(HasFixedSize(format));
  }
}

TEST(WireFormatTest, FormatsHaveTheNamesThatUsersKnow) {
  EXPECT_STREQ(Name(WireFormat::kInt8), "int8");
  EXPECT_STREQ(Name(WireFormat::kOneBit), "onebit");
  EXPECT_STREQ(Name(WireFormat::kTopK), "topk");
  EXPECT_STREQ(Name(static_cast<WireFormat>(10)), "invalid");
}

TEST(WireFormatTest, NumbersOnTheWireNeverChange) {
  EXPECT_EQ(static_cast<int>(WireFormat::kInt8), 16);
  EXPECT_EQ(static_cast<int>(WireFormat::kOneBit), 17);
  EXPECT_EQ(static_cast<int>(WireFormat::kTopK), 18);
}

TEST(WireFormatTest, SizesCountEveryBlockThatHasBegun) {
  const struct {
    uint64_t elems, int8, onebit, topk;
  } cases[] = {
      {0, 0, 0, 4},         {1, 5, 5, 9},         {8, 12, 5, 44},          {9, 13, 6, 49},
      {256, 260, 36, 1284}, {257, 265, 37, 1289}, {1024, 1040, 132, 5124}, {1025, 1045, 137, 5129}};
  for (const auto& c : cases) {
    EXPECT_EQ(MaxEncodedBytes(WireFormat::kInt8, c.elems), c.int8) << c.elems;
    EXPECT_EQ(MaxEncodedBytes(WireFormat::kOneBit, c.elems), c.onebit) << c.elems;
    EXPECT_EQ(MaxEncodedBytes(WireFormat::kTopK, c.elems), c.topk) << c.elems;
  }
  EXPECT_TRUE(HasFixedSize(WireFormat::kInt8) && HasFixedSize(WireFormat::kOneBit));
  EXPECT_FALSE(HasFixedSize(WireFormat::kTopK));
}

TEST(WireFormatTest, OnlyPossiblePayloadsAreAccepted) {
  for (WireFormat format : kDense) {
    EXPECT_TRUE(IsPayloadSize(format, 10, 10 * SizeOf(DTypeOf(format))));
    EXPECT_FALSE(IsPayloadSize(format, 10, 10 * SizeOf(DTypeOf(format)) + 1));
  }
  EXPECT_TRUE(IsPayloadSize(WireFormat::kInt8, 257, 265));
  EXPECT_FALSE(IsPayloadSize(WireFormat::kInt8, 257, 264));
  EXPECT_TRUE(IsPayloadSize(WireFormat::kOneBit, 1025, 137));
  EXPECT_FALSE(IsPayloadSize(WireFormat::kOneBit, 1025, 138));
  for (uint64_t bytes : {4u, 9u, 54u}) EXPECT_TRUE(IsPayloadSize(WireFormat::kTopK, 10, bytes));
  for (uint64_t bytes : {0u, 3u, 55u}) EXPECT_FALSE(IsPayloadSize(WireFormat::kTopK, 10, bytes));
}

TEST(WireFormatTest, ElementCountsWhoseSizeWouldOverflowAreRefused) {
  // 2^62 elements of 4 bytes, and 2^64 - 1 of any lossy format, are few bytes modulo 2^64.
  EXPECT_FALSE(IsPayloadSize(WireFormat::kFloat32, uint64_t{1} << 62, 0));
  for (WireFormat format : kLossy) {
    for (uint64_t elems : {kMaxLossyElems + 1, uint64_t{1} << 63, ~uint64_t{0}}) {
      EXPECT_FALSE(IsPayloadSize(format, elems, MaxEncodedBytes(format, elems)));
    }
  }
}

TEST(WireFormatTest, FormatsOfFloatsAndLossyOnesAreKnownByName) {
  for (const WireFormat format : {WireFormat::kBFloat16, WireFormat::kInt8, WireFormat::kTopK}) {
    EXPECT_EQ(ParseWireFormat(Name(format)).value(), format);
  }
  EXPECT_EQ(ParseWireFormat("int32").status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(WireFormatTest, ChunksAreAsSmallAsPromised) {
  const uint64_t elems = 1 << 18;
  const double raw = 4.0 * static_cast<double>(elems);
  EXPECT_LE(static_cast<double>(MaxEncodedBytes(WireFormat::kInt8, elems)), 0.26 * raw);
  EXPECT_LE(static_cast<double>(MaxEncodedBytes(WireFormat::kOneBit, elems)), 0.035 * raw);
}

}  // namespace
}  // namespace thalweg::wire_format_test
