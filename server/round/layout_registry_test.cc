#include "server/round/layout_registry.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace thalweg::layout_registry_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr uint64_t kPlacement = 7;
const BucketLayout kLayout{DType::kFloat32, {{"w", {1000}}, {"b", {500}}}};

BucketAnnouncement Announce(BucketId id, const BucketLayout& layout, uint64_t placement,
                            WireFormat wire = WireFormat::kFloat32) {
  return {id, layout, wire, placement};
}

Contribution Share(BucketId id, uint32_t chunk, WireFormat wire, uint64_t elems) {
  auto buffer = std::make_shared<std::vector<std::byte>>(MaxEncodedBytes(wire, elems));
  return {{id, chunk, 1}, 1, wire, elems, Payload(std::span<const std::byte>(*buffer), buffer)};
}

TEST(LayoutRegistryTest, DifferentLayoutIsRefusedNamingTensorAndNodes) {
  LayoutRegistry registry(4096, 1);
  ASSERT_TRUE(registry.Register("node 0 (a)", Announce({0, 0}, kLayout, kPlacement)).ok());
  ASSERT_TRUE(registry.Register("node 1 (b)", Announce({0, 0}, kLayout, kPlacement)).ok());
  BucketLayout other = kLayout;
  other.tensors[1].name = "bias";
  const absl::Status status = registry.Register("node 2 (c)", Announce({0, 0}, other, kPlacement));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("'b'"), HasSubstr("'bias'"), HasSubstr("node 0 (a)"),
                    HasSubstr("node 2 (c)")));
}

TEST(LayoutRegistryTest, DifferentPlacementIsRefusedNamingBothNodes) {
  LayoutRegistry registry(4096, 1);
  ASSERT_TRUE(registry.Register("node 0 (a)", Announce({0, 0}, kLayout, 1)).ok());
  const absl::Status status = registry.Register("node 1 (b)", Announce({0, 0}, kLayout, 2));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("node 0 (a)"), HasSubstr("node 1 (b)"), HasSubstr("shards")));
}

TEST(LayoutRegistryTest, PaddingOfAChunkIsCountedFromItsBegin) {
  LayoutRegistry registry(4096, 1);  // chunks of 4096 elements in int8
  const BucketLayout layout{DType::kFloat32,
                            {{"w", {3}}, {"", {253}}, {"v", {3800}}, {"", {200}}, {"b", {900}}}};
  ASSERT_TRUE(registry.Register("a", Announce({0, 0, 1}, layout, 1, WireFormat::kInt8)).ok());
  EXPECT_EQ(registry.Padding({0, 0, 1}, 0),
            (std::vector<ElemRange>{{3, 256}, {3 + 253 + 3800, 4096}}));
  EXPECT_EQ(registry.Padding({0, 0, 1}, 1), (std::vector<ElemRange>{{0, 160}}));
}

TEST(LayoutRegistryTest, DifferentOrImpossibleWireTypeIsRefused) {
  LayoutRegistry registry(4096, 1);
  ASSERT_TRUE(registry.Register("a", Announce({0, 0}, kLayout, 1, WireFormat::kFloat16)).ok());
  const absl::Status differs = registry.Register("b", Announce({0, 0}, kLayout, 1));
  EXPECT_THAT(std::string(differs.message()), HasSubstr("b sends bucket 0 in fp32, a in fp16"));
  EXPECT_FALSE(registry.Register("a", Announce({1, 0}, kLayout, 1, WireFormat::kFloat64)).ok());
}

TEST(LayoutRegistryTest, PartsOfABucketAreRegisteredOnTheirOwn) {
  LayoutRegistry registry(4096, 1);
  const BucketLayout factors{DType::kFloat32, {{"w/P", {20}}}};
  ASSERT_TRUE(registry.Register("a", Announce({0, 0, 0}, kLayout, 1)).ok());
  ASSERT_TRUE(registry.Register("a", Announce({0, 0, 1}, factors, 2)).ok());
  EXPECT_TRUE(registry.Check(0, Share({0, 0, 0}, 0, WireFormat::kFloat32, 1024)).ok());
  EXPECT_TRUE(registry.Check(0, Share({0, 0, 1}, 0, WireFormat::kFloat32, 20)).ok());
  EXPECT_FALSE(registry.Check(0, Share({0, 0, 2}, 0, WireFormat::kFloat32, 20)).ok());
}

TEST(LayoutRegistryTest, ContributionToABucketInAGroupIsRefused) {
  LayoutRegistry registry(4096, 1);
  ASSERT_TRUE(registry.Register("a", Announce({0, 0}, kLayout, 1)).ok());
  Contribution share = Share({0, 0}, 0, WireFormat::kFloat32, 1024);
  share.group = 7;
  const absl::Status refused = registry.Check(2, share).status();
  EXPECT_TRUE(absl::IsInvalidArgument(refused));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("but node 2 names group 7"));
}

TEST(LayoutRegistryTest, BucketsAndPartsBeyondTheLimitsAreRefused) {
  constexpr uint32_t kMaxBuckets = 65536;
  LayoutRegistry registry(4096, 1);
  EXPECT_TRUE(registry.Register("a", Announce({kMaxBuckets - 1, 0}, kLayout, 1)).ok());
  EXPECT_TRUE(registry.Register("a", Announce({0, 0, kMaxParts - 1}, kLayout, 1)).ok());
  EXPECT_TRUE(
      absl::IsInvalidArgument(registry.Register("a", Announce({kMaxBuckets, 0}, kLayout, 1))));
  EXPECT_TRUE(
      absl::IsInvalidArgument(registry.Register("a", Announce({0, 0, kMaxParts}, kLayout, 1))));
}

TEST(LayoutRegistryTest, NewGenerationReplacesAndOldOneIsRefused) {
  LayoutRegistry registry(4096, 1);
  ASSERT_TRUE(registry.Register("a", Announce({0, 0}, kLayout, kPlacement)).ok());
  const BucketLayout rebuilt{DType::kFloat32, {{"b", {500}}}};
  ASSERT_TRUE(registry.Register("a", Announce({0, 1}, rebuilt, kPlacement)).ok());
  EXPECT_EQ(registry.Register("b", Announce({0, 0}, kLayout, kPlacement)).code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(registry.Check(0, Share({0, 0}, 0, WireFormat::kFloat32, 1024)).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(registry.Check(0, Share({0, 1}, 0, WireFormat::kFloat32, 500)).ok());
}

TEST(LayoutRegistryTest, LayoutsOfAJobTakeBoundedMemory) {
  LayoutRegistry registry(4096, 1);
  BucketLayout large{DType::kFloat32, {}};
  large.tensors.assign(100'000, TensorSpec{"w", {1}});
  uint32_t index = 0;
  absl::Status status;
  while (status.ok() && index < 100) {
    status = registry.Register("node 0 (a)", Announce({index++, 0}, large, kPlacement));
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("node 0 (a)"), HasSubstr("100000 tensors"),
                    HasSubstr("at most 33554432 are kept")));
  const uint64_t least = large.tensors.size() * sizeof(TensorSpec);
  EXPECT_LE((index - 1) * least, LayoutRegistry::kMaxBytes);
  EXPECT_GT(index * least * 2, LayoutRegistry::kMaxBytes);
  // The same layout from another node takes nothing, and a new one replaces the old one.
  EXPECT_TRUE(registry.Register("node 1 (b)", Announce({0, 0}, large, kPlacement)).ok());
  EXPECT_TRUE(registry.Register("node 1 (b)", Announce({0, 1}, large, kPlacement)).ok());
  EXPECT_FALSE(registry.Register("node 1 (b)", Announce({index, 0}, large, kPlacement)).ok());
}

TEST(LayoutRegistryTest, UpdatedBucketIsRefusedBeforeTooManyChunksAreMade) {
  LayoutRegistry registry(4096, 1);
  BucketAnnouncement bucket = Announce({0, 0}, {DType::kFloat32, {{"w", {1 << 20, 1 << 19}}}}, 1);
  bucket.update = UpdateRule{.groups = {0}};
  const absl::Status status = registry.Register("node 0 (a)", bucket);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("node 0 (a)"), HasSubstr("at most 33554432 are kept")));
  EXPECT_EQ(registry.bytes(), 0u);
}

TEST(LayoutRegistryTest, ResidualsAreCountedForOneOfAllShards) {
  LayoutRegistry registry(4096, 4);
  const BucketLayout layout{DType::kFloat32, {{"w", {10'000}}}};
  const auto announce = [&](BucketId id, WireFormat wire) {
    return registry.Register("node 0 (a)", {id, layout, wire, kPlacement, 0});
  };
  ASSERT_TRUE(announce({0, 0}, WireFormat::kFloat32).ok());
  EXPECT_EQ(registry.state_bytes(), 0u);
  ASSERT_TRUE(announce({1, 0}, WireFormat::kInt8).ok());
  ASSERT_TRUE(announce({2, 0}, WireFormat::kOneBit).ok());
  EXPECT_EQ(registry.state_bytes(), 2 * 10'000u);
  ASSERT_TRUE(announce({2, 1}, WireFormat::kFloat32).ok());
  EXPECT_EQ(registry.state_bytes(), 10'000u);
}

TEST(LayoutRegistryTest, ContributionMustMatchTypeSizeAndChunk) {
  LayoutRegistry registry(4096, 1);  // 1024 elements per chunk
  ASSERT_TRUE(
      registry.Register("a", Announce({0, 0}, kLayout, kPlacement, WireFormat::kFloat16)).ok());
  EXPECT_TRUE(registry.Check(0, Share({0, 0}, 0, WireFormat::kFloat16, 1024)).ok());
  EXPECT_TRUE(registry.Check(0, Share({0, 0}, 1, WireFormat::kFloat16, 476)).ok());
  EXPECT_FALSE(registry.Check(0, Share({0, 0}, 0, WireFormat::kFloat32, 1024)).ok());
  EXPECT_FALSE(registry.Check(0, Share({0, 0}, 1, WireFormat::kFloat16, 1024)).ok());
  EXPECT_FALSE(registry.Check(0, Share({0, 0}, 2, WireFormat::kFloat16, 1)).ok());
  EXPECT_FALSE(registry.Check(0, Share({1, 0}, 0, WireFormat::kFloat16, 1024)).ok());
  Contribution short_one = Share({0, 0}, 0, WireFormat::kFloat16, 1024);
  short_one.payload.pieces[0] = short_one.payload.pieces[0].first(2047);
  EXPECT_FALSE(registry.Check(0, short_one).ok());
}

TEST(LayoutRegistryTest, LossyFormatsAreForFloat32Alone) {
  LayoutRegistry registry(4096, 1);
  uint32_t index = 0;
  for (WireFormat wire : {WireFormat::kInt8, WireFormat::kOneBit, WireFormat::kTopK}) {
    EXPECT_TRUE(registry.Register("a", Announce({index++, 0, 1}, kLayout, 1, wire)).ok());
    for (DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat64}) {
      const absl::Status status =
          registry.Register("a", Announce({index++, 0, 1}, {dtype, kLayout.tensors}, 1, wire));
      EXPECT_THAT(std::string(status.message()),
                  HasSubstr(absl::StrCat("of ", Name(dtype), " to be sent in ", Name(wire))));
    }
  }
}

TEST(LayoutRegistryTest, LossyContributionMustHaveThePlannedChunksSize) {
  const BucketLayout layout{DType::kFloat32, {{"w", {40'000}}}};
  // A chunk of 4096 bytes holds 1024 elements of fp32, four times as many of int8, 16 times of
  // onebit; topk's are of half a million.
  const struct {
    WireFormat wire;
    uint64_t elems;
    size_t bytes;
  } cases[] = {{WireFormat::kInt8, 4096, 4096 + 4 * 16},
               {WireFormat::kOneBit, 16384, 16384 / 8 + 4 * 16},
               {WireFormat::kTopK, 40'000, 4 + 5 * 40'000}};
  for (const auto& c : cases) {
    LayoutRegistry registry(4096, 1);
    ASSERT_TRUE(registry.Register("a", Announce({0, 0, 1}, layout, 1, c.wire)).ok());
    Contribution share = Share({0, 0, 1}, 0, c.wire, c.elems);
    ASSERT_EQ(share.payload.SizeBytes(), c.bytes);
    EXPECT_TRUE(registry.Check(0, share).ok()) << registry.Check(0, share).status();
    EXPECT_FALSE(registry.Check(0, Share({0, 0, 1}, 0, c.wire, c.elems - 1)).ok());
    EXPECT_FALSE(registry.Check(0, Share({0, 0, 1}, 0, WireFormat::kFloat32, c.elems)).ok());
    const std::span<const std::byte> whole = share.payload.pieces[0];
    share.payload.pieces[0] = whole.first(c.bytes - 1);
    EXPECT_EQ(registry.Check(0, share).ok(), c.wire == WireFormat::kTopK);
    share.payload.pieces[0] = whole.first(3);
    EXPECT_THAT(std::string(registry.Check(0, share).status().message()),
                AllOf(HasSubstr(absl::StrCat(c.bytes, " bytes")), HasSubstr(", 3 bytes")));
    share.payload.pieces = {whole, whole.first(1)};
    EXPECT_FALSE(registry.Check(0, share).ok());
  }
}

TEST(LayoutRegistryTest, ResidualsBelongToChunksThatLoseSomething) {
  const BucketLayout layout{DType::kFloat32, {{"w", {5000}}}};
  LayoutRegistry registry(4096, 1);
  ASSERT_TRUE(registry.Register("a", Announce({0, 0, 1}, layout, 1, WireFormat::kInt8)).ok());
  ASSERT_TRUE(registry.Register("a", Announce({0, 0, 4}, layout, 1, WireFormat::kTopK)).ok());
  EXPECT_EQ(registry.ResidualElems({0, 0, 1}, 0).value(), 4096u);
  EXPECT_EQ(registry.ResidualElems({0, 0, 1}, 1).value(), 904u);
  EXPECT_TRUE(absl::IsInvalidArgument(registry.ResidualElems({0, 0, 1}, 2).status()));
  EXPECT_TRUE(absl::IsFailedPrecondition(registry.ResidualElems({0, 1, 1}, 0).status()));
  EXPECT_TRUE(absl::IsFailedPrecondition(registry.ResidualElems({0, 0, 7}, 0).status()));
  const absl::Status lossless = registry.ResidualElems({0, 0, 4}, 0).status();
  EXPECT_TRUE(absl::IsInvalidArgument(lossless));
  EXPECT_THAT(std::string(lossless.message()), HasSubstr("topk, which leaves no residual"));
}

TEST(LayoutRegistryTest, ChunkStandsForItsShareOfTheGradient) {
  LayoutRegistry registry(4096, 1);
  BucketAnnouncement bucket = Announce({0, 0}, kLayout, kPlacement, WireFormat::kFloat16);
  bucket.raw_bytes = 4 * 1500;
  ASSERT_TRUE(registry.Register("node 0 (a)", bucket).ok());
  EXPECT_EQ(registry.WeightOf({0, 0}, 300).raw_bytes, 1200);
  EXPECT_EQ(registry.WeightOf({0, 0}, 300).kind.wire, WireFormat::kFloat16);
  EXPECT_FALSE(registry.WeightOf({0, 0}, 300).kind.factors);

  bucket.id.part = 1;
  bucket.raw_bytes = 600'000;
  ASSERT_TRUE(registry.Register("node 0 (a)", bucket).ok());
  EXPECT_EQ(registry.WeightOf(bucket.id, 300).raw_bytes, 120'000);
  EXPECT_TRUE(registry.WeightOf(bucket.id, 300).kind.factors);
}

}  // namespace
}  // namespace thalweg::layout_registry_test
