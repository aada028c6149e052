#include "core/base/layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "core/base/protocol.h"

namespace thalweg::layout_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

BucketLayout Layout(std::vector<TensorSpec> tensors) {
  return {DType::kFloat32, std::move(tensors)};
}

TEST(LayoutTest, EqualLayoutsHaveEqualFingerprints) {
  const BucketLayout a = Layout({{"w", {3, 4}}, {"b", {4}}});
  EXPECT_EQ(a.Fingerprint(), Layout({{"w", {3, 4}}, {"b", {4}}}).Fingerprint());
  EXPECT_EQ(a.Elems(), 16u);
}

TEST(LayoutTest, FingerprintDependsOnOrderNameShapeAndType) {
  const uint64_t base = Layout({{"w", {3, 4}}, {"b", {4}}}).Fingerprint();
  EXPECT_NE(base, Layout({{"b", {4}}, {"w", {3, 4}}}).Fingerprint());
  EXPECT_NE(base, Layout({{"v", {3, 4}}, {"b", {4}}}).Fingerprint());
  EXPECT_NE(base, Layout({{"w", {4, 3}}, {"b", {4}}}).Fingerprint());
  BucketLayout half = Layout({{"w", {3, 4}}, {"b", {4}}});
  half.dtype = DType::kFloat16;
  EXPECT_NE(base, half.Fingerprint());
}

TEST(LayoutTest, FingerprintDoesNotConfuseNameBoundaries) {
  EXPECT_NE(Layout({{"ab", {1}}, {"c", {1}}}).Fingerprint(),
            Layout({{"a", {1}}, {"bc", {1}}}).Fingerprint());
}

TEST(LayoutTest, MismatchNamesTensorAndBothOwners) {
  const absl::Status status = CheckSameLayout({2, 1}, Layout({{"fc1.weight", {3, 4}}}), "rank 0",
                                              Layout({{"fc2.weight", {3, 4}}}), "rank 3");
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("fc1.weight"), HasSubstr("fc2.weight"), HasSubstr("rank 0"),
                    HasSubstr("rank 3"), HasSubstr("bucket 2 (layout 1)")));
}

TEST(LayoutTest, ExtraTensorIsNamedWithItsOwner) {
  const absl::Status status = CheckSameLayout({0, 0}, Layout({{"w", {2}}}), "node 0",
                                              Layout({{"w", {2}}, {"b", {7}}}), "node 1");
  EXPECT_THAT(std::string(status.message()), HasSubstr("'b' [7], exists only on node 1"));
}

class ChunkPlanTest : public ::testing::TestWithParam<WireFormat> {};
INSTANTIATE_TEST_SUITE_P(Formats, ChunkPlanTest,
                         ::testing::Values(WireFormat::kFloat32, WireFormat::kInt8,
                                           WireFormat::kOneBit, WireFormat::kTopK),
                         [](const auto& info) { return std::string(Name(info.param)); });

TEST(BucketLayoutTest, TensorsWithoutANameArePadding) {
  const BucketLayout layout{DType::kFloat32, {{"w", {3}}, {"", {253}}, {"b", {2, 2}}, {"", {4}}}};
  EXPECT_EQ(layout.Padding(), (std::vector<ElemRange>{{3, 256}, {260, 264}}));
}

TEST_P(ChunkPlanTest, ChunksCoverEveryElementOnce) {
  for (uint32_t shards : {1u, 3u, 8u}) {
    for (uint64_t chunk_bytes : {4096u, 100'000u, 1u << 20}) {
      for (uint64_t total : {0u, 1u, 1023u, 1024u, 5000u, 99'999u, 262'144u, 4'000'001u}) {
        const ChunkPlan plan =
            ChunkPlan::For(total, DType::kFloat32, GetParam(), chunk_bytes, shards);
        uint64_t covered = 0;
        for (uint32_t c = 0; c < plan.Count(); ++c) {
          ASSERT_EQ(plan.Begin(c), covered);
          ASSERT_GT(plan.Elems(c), 0u);
          ASSERT_LE(plan.Elems(c), plan.chunk_elems);
          ASSERT_EQ(plan.ChunkOf(covered), c);
          ASSERT_EQ(plan.ChunkOf(covered + plan.Elems(c) - 1), c);
          covered += plan.Elems(c);
        }
        ASSERT_EQ(covered, total);
      }
    }
  }
}

TEST(ChunkPlanSizeTest, LargeBucketBeginsAndEndsWithSmallAlignedChunks) {
  constexpr uint64_t kChunk = 256 << 10;  // bytes
  const ChunkPlan plan =
      ChunkPlan::For(10'000'001, DType::kFloat32, WireFormat::kFloat32, kChunk, 2);
  const uint32_t count = plan.Count();
  for (uint32_t c = 0; c < count; ++c) EXPECT_EQ(4 * plan.Begin(c) % 64, 0u);
  for (uint32_t c = 0; c < 4; ++c) {
    EXPECT_EQ(4 * plan.Elems(c), kChunk / 4);
    EXPECT_EQ(4 * plan.Elems(count - 2 - c), kChunk / 4);
  }
  EXPECT_EQ(4 * plan.Elems(4), kChunk);
  EXPECT_LE(4 * plan.Elems(count - 1), kChunk / 4);
}

TEST(ChunkPlanSizeTest, SmallBucketHasFourChunksForEachShardDownTo16KiB) {
  constexpr uint64_t kChunk = 1 << 20;
  const auto chunk_bytes = [](uint64_t elems, uint32_t shards) {
    return 4 *
           ChunkPlan::For(elems, DType::kFloat32, WireFormat::kFloat32, kChunk, shards).chunk_elems;
  };
  EXPECT_EQ(chunk_bytes(1 << 20, 4), 256u << 10);  // 4 MiB
  EXPECT_EQ(chunk_bytes(64 << 10, 4), 16u << 10);  // 256 KiB
  EXPECT_EQ(chunk_bytes(1000, 4), 16u << 10);
  EXPECT_EQ(chunk_bytes(0, 4), 16u << 10);
  EXPECT_EQ(chunk_bytes(100 << 20, 4), kChunk);
  EXPECT_EQ(chunk_bytes((1 << 20) + 3, 4) % 64, 0u);
}

TEST(ChunkPlanSizeTest, LossyChunksAreLargerSoThatAsMuchCrossesTheWire) {
  const auto chunk_bytes = [](WireFormat wire, uint64_t elems, uint64_t bytes) {
    return 4 * ChunkPlan::For(elems, DType::kFloat32, wire, bytes, 4).chunk_elems;
  };
  constexpr uint64_t kLarge = 100 << 20;
  EXPECT_EQ(chunk_bytes(WireFormat::kOneBit, kLarge, 64 << 10), 1u << 20);
  EXPECT_EQ(chunk_bytes(WireFormat::kOneBit, kLarge, 1 << 20), 4u << 20);
  EXPECT_EQ(chunk_bytes(WireFormat::kOneBit, 1000, 1 << 20), 256u << 10);
  EXPECT_EQ(chunk_bytes(WireFormat::kOneBit, 1000, 4096), 64u << 10);
  EXPECT_EQ(chunk_bytes(WireFormat::kInt8, kLarge, 64 << 10), 256u << 10);
  EXPECT_EQ(chunk_bytes(WireFormat::kInt8, kLarge, 2 << 20), 4u << 20);
  EXPECT_EQ(chunk_bytes(WireFormat::kInt8, 1000, 1 << 20), 64u << 10);
  // A larger requested size is kept.
  EXPECT_EQ(chunk_bytes(WireFormat::kOneBit, kLarge, 8 << 20), 8u << 20);
  for (WireFormat wire : {WireFormat::kFloat16, WireFormat::kFloat64}) {
    EXPECT_EQ(chunk_bytes(wire, kLarge, 64 << 10), 64u << 10);
  }
}

// Its largest values are chosen in each chunk, and flows follow measured links.
TEST(ChunkPlanSizeTest, ChunksOfTopKAreTheSameForAllFlowsAndShards) {
  for (uint64_t total : {uint64_t{1}, uint64_t{100'001}, uint64_t{10'000'019}}) {
    for (uint64_t chunk_bytes : {kMinChunkBytes, uint64_t{100'000}, kMaxChunkBytes}) {
      for (uint32_t shards : {1u, 3u, 8u}) {
        const ChunkPlan plan =
            ChunkPlan::For(total, DType::kFloat32, WireFormat::kTopK, chunk_bytes, shards);
        ASSERT_EQ(plan.Count(), (total + (1 << 19) - 1) >> 19);
        for (uint32_t c = 0; c < plan.Count(); ++c) ASSERT_EQ(plan.Begin(c), uint64_t{c} << 19);
      }
    }
  }
}

TEST(ChunkPlanSizeTest, LossyChunksAreOfWholeBlocksButForTheLast) {
  for (WireFormat wire : {WireFormat::kInt8, WireFormat::kOneBit, WireFormat::kTopK}) {
    for (uint64_t total : {100'001u, 1'000'003u, 10'000'019u}) {
      for (uint64_t chunk_bytes : {kMinChunkBytes, uint64_t{5'001}, uint64_t{256 << 10}}) {
        const ChunkPlan plan = ChunkPlan::For(total, DType::kFloat32, wire, chunk_bytes, 3);
        for (uint32_t c = 0; c < plan.Count(); ++c) {
          ASSERT_EQ(plan.Begin(c) % kLossyUnitElems, 0u) << c << " of " << chunk_bytes;
        }
      }
    }
  }
}

}  // namespace
}  // namespace thalweg::layout_test
