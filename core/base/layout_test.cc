#include "core/base/layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace thalweg {
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

TEST(ChunkPlanTest, ChunksCoverEveryElementOnce) {
  for (uint64_t total : {0u, 1u, 1023u, 1024u, 1025u, 5000u}) {
    const ChunkPlan plan = ChunkPlan::For(total, DType::kFloat32, 4096, 1);
    uint64_t covered = 0;
    for (uint32_t c = 0; c < plan.Count(); ++c) {
      EXPECT_EQ(plan.Begin(c), covered);
      EXPECT_GT(plan.Elems(c), 0u);
      covered += plan.Elems(c);
    }
    EXPECT_EQ(covered, total);
  }
}

TEST(ChunkPlanTest, SmallBucketHasFourChunksForEachShardDownTo16KiB) {
  constexpr uint64_t kChunk = 1 << 20;
  const auto chunk_bytes = [](uint64_t elems, uint32_t shards) {
    return 4 * ChunkPlan::For(elems, DType::kFloat32, kChunk, shards).chunk_elems;
  };
  EXPECT_EQ(chunk_bytes(1 << 20, 4), 256u << 10);  // 4 MiB
  EXPECT_EQ(chunk_bytes(64 << 10, 4), 16u << 10);  // 256 KiB
  EXPECT_EQ(chunk_bytes(1000, 4), 16u << 10);
  EXPECT_EQ(chunk_bytes(0, 4), 16u << 10);
  EXPECT_EQ(chunk_bytes(100 << 20, 4), kChunk);
  EXPECT_EQ(chunk_bytes((1 << 20) + 3, 4) % 64, 0u);
}

}  // namespace
}  // namespace thalweg
