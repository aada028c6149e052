#include "server/round/flow_plan.h"

#include <gtest/gtest.h>

#include <bit>
#include <limits>

#include "core/base/protocol.h"

namespace thalweg {
namespace {

using std::chrono::microseconds;
constexpr double kMegabit = 1e6 / 8;

TEST(FlowPlanTest, ChunkIsFourMillisecondsOfTheLinkRoundedDownToAPowerOfTwo) {
  // 250 Mbit/s carry 125 000 bytes in 4 ms, 1 Gbit/s 500 000.
  EXPECT_EQ(PlanFlow({250 * kMegabit, microseconds(200)}, 4, DType::kFloat32).chunk_bytes,
            64u << 10);
  EXPECT_EQ(PlanFlow({1000 * kMegabit, microseconds(200)}, 4, DType::kFloat32).chunk_bytes,
            256u << 10);
}

TEST(FlowPlanTest, WindowCoversAHundredMillisecondsOfTheLinkOverAllShards) {
  // 1 Gbit/s carries 12.5 MB in 100 ms: 48 chunks of 256 KiB (rounded up), divided among the
  // shards.
  const LinkSpeed link{1000 * kMegabit, {}};
  EXPECT_EQ(PlanFlow(link, 1, DType::kFloat32).window_chunks, 48u);
  EXPECT_EQ(PlanFlow(link, 4, DType::kFloat32).window_chunks, 12u);
  EXPECT_EQ(
      PlanFlow({1000 * kMegabit, std::chrono::milliseconds(50)}, 4, DType::kFloat32).window_chunks,
      24u);
}

TEST(FlowPlanTest, WhateverWasMeasuredThePlanIsWithinTheProtocolsBounds) {
  for (double rate :
       {1e-300, 1.0, 1e3, 1e6, 1e9, 1e12, 1e300, std::numeric_limits<double>::max()}) {
    for (uint32_t shards : {1u, 7u, 4096u}) {
      const FlowPlan plan = PlanFlow({rate, std::chrono::hours(1)}, shards, DType::kFloat32);
      EXPECT_TRUE(std::has_single_bit(plan.chunk_bytes)) << rate;
      EXPECT_GE(plan.chunk_bytes, kMinChunkBytes);
      EXPECT_LE(plan.chunk_bytes, kMaxChunkBytes);
      EXPECT_GE(plan.window_chunks, 8u);
      EXPECT_LE(plan.window_chunks, kMaxWindowChunks);
    }
  }
}

TEST(FlowPlanTest, HalfSizeCodecsGetChunksOfAsManyBytesOnTheWire) {
  const LinkSpeed link{1000 * kMegabit, {}};
  const FlowPlan raw = PlanFlow(link, 4, DType::kFloat32);
  for (DType codec : {DType::kFloat16, DType::kBFloat16}) {
    EXPECT_EQ(PlanFlow(link, 4, codec).chunk_bytes, 2 * raw.chunk_bytes);
    EXPECT_EQ(PlanFlow(link, 4, codec).window_chunks, raw.window_chunks);
  }
}

TEST(FlowPlanTest, WithoutANetworkThePlanDoesNotDependOnShards) {
  EXPECT_EQ(PlanFlow({}, 1, DType::kFloat32).chunk_bytes,
            PlanFlow({}, 8, DType::kFloat32).chunk_bytes);
  EXPECT_GE(PlanFlow({}, 1, DType::kFloat32).window_chunks, 8u);
}

}  // namespace
}  // namespace thalweg
