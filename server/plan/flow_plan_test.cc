#include "server/plan/flow_plan.h"

#include <gtest/gtest.h>

#include <bit>
#include <limits>
#include <vector>

#include "core/base/protocol.h"

namespace thalweg::flow_plan_test {
namespace {

using std::chrono::microseconds;
constexpr double kMegabit = 1e6 / 8;

FlowPlan PlanEqually(const LinkSpeed& link, uint32_t num_shards, DType wire = DType::kFloat32) {
  return PlanFlow(link, std::vector<uint32_t>(num_shards, 7), wire);
}

TEST(FlowPlanTest, ChunkIsFourMillisecondsOfTheLinkRoundedDownToAPowerOfTwo) {
  // 250 Mbit/s carry 125 000 bytes in 4 ms, 1 Gbit/s 500 000.
  EXPECT_EQ(PlanEqually({250 * kMegabit, microseconds(200)}, 2).chunk_bytes, 64u << 10);
  EXPECT_EQ(PlanEqually({1000 * kMegabit, microseconds(200)}, 2).chunk_bytes, 256u << 10);
}

TEST(FlowPlanTest, ManyShardsGetChunksOfWhichSeveralToEachFitIntoTheWindows) {
  // 250 Mbit/s carry 1.25 MB in 40 ms: 4 chunks to each of 8 shards have 39 000 bytes.
  EXPECT_EQ(PlanEqually({250 * kMegabit, {}}, 8).chunk_bytes, 32u << 10);
  const std::vector<uint32_t> one_has_none = {1, 1, 1, 1, 1, 1, 1, 1, 0};
  EXPECT_EQ(PlanFlow({250 * kMegabit, {}}, one_has_none, DType::kFloat32).chunk_bytes, 32u << 10);
}

TEST(FlowPlanTest, WindowsTogetherCoverFortyMillisecondsAndTwoRoundTripsOfTheLink) {
  // 500 Mbit/s carry 2.5 MB in 40 ms: 20 chunks of 128 KiB (rounded up).
  const LinkSpeed link{500 * kMegabit, {}};
  EXPECT_EQ(PlanEqually(link, 1).window_chunks, 20u);
  EXPECT_EQ(PlanEqually(link, 2).window_chunks, 10u);
  EXPECT_EQ(PlanEqually({500 * kMegabit, std::chrono::milliseconds(20)}, 2).window_chunks, 20u);
}

TEST(FlowPlanTest, WindowsOfFastLinksStayInTheCache) {
  const auto in_flight = [](double megabits) {
    const FlowPlan plan = PlanEqually({megabits * kMegabit, {}}, 1);
    return plan.chunk_bytes * plan.window_chunks;
  };
  EXPECT_EQ(in_flight(1000), 4u << 20);
  EXPECT_EQ(in_flight(10'000), 6u << 20);  // at least 6 chunks, of 1 MiB
  // 40 Gbit/s carry 10 MB in 2 ms: 10 chunks of 1 MiB.
  EXPECT_EQ(in_flight(40'000), 10u << 20);
}

TEST(FlowPlanTest, WindowIsThatOfTheLargestShare) {
  const LinkSpeed link{500 * kMegabit, {}};
  EXPECT_EQ(PlanFlow(link, std::vector<uint32_t>{3, 1}, DType::kFloat32).window_chunks, 15u);
}

TEST(FlowPlanTest, WindowGrowsUntilThoseOfOtherSharesAreInProportion) {
  // 500 Mbit/s carry 1.67 MB of two thirds in 40 ms: 13 chunks of 128 KiB, of which half are 6.5.
  const LinkSpeed link{500 * kMegabit, {}};
  EXPECT_EQ(PlanFlow(link, std::vector<uint32_t>{2, 1}, DType::kFloat32).window_chunks, 14u);
}

TEST(FlowPlanTest, UnequalShardsGetMoreAndSmallerChunks) {
  // 1.25 MB are 6 chunks of 35 000 bytes for each of 6 shards, and 4 of 52 000.
  const LinkSpeed link{250 * kMegabit, {}};
  const std::vector<uint32_t> shares = {3, 3, 1, 1, 1, 1};
  EXPECT_EQ(PlanFlow(link, shares, DType::kFloat32).chunk_bytes, 32u << 10);
  const LinkSpeed slower{200 * kMegabit, {}};
  EXPECT_EQ(PlanFlow(slower, shares, DType::kFloat32).chunk_bytes, 16u << 10);
  EXPECT_EQ(PlanEqually(slower, 6).chunk_bytes, 32u << 10);
}

TEST(FlowPlanTest, WhateverWasMeasuredThePlanIsWithinTheProtocolsBounds) {
  for (double rate :
       {1e-300, 1.0, 1e3, 1e6, 1e9, 1e12, 1e300, std::numeric_limits<double>::max()}) {
    for (uint32_t shards : {1u, 7u, 4096u}) {
      const FlowPlan plan = PlanEqually({rate, std::chrono::hours(1)}, shards);
      EXPECT_TRUE(std::has_single_bit(plan.chunk_bytes)) << rate;
      EXPECT_GE(plan.chunk_bytes, kMinChunkBytes);
      EXPECT_LE(plan.chunk_bytes, kMaxChunkBytes);
      EXPECT_GE(plan.window_chunks, 6u);
      EXPECT_LE(plan.window_chunks, kMaxWindowChunks);
    }
  }
}

TEST(FlowPlanTest, HalfSizeCodecsGetChunksOfAsManyBytesOnTheWire) {
  const LinkSpeed link{1000 * kMegabit, {}};
  const FlowPlan raw = PlanEqually(link, 2);
  for (DType codec : {DType::kFloat16, DType::kBFloat16}) {
    EXPECT_EQ(PlanEqually(link, 2, codec).chunk_bytes, 2 * raw.chunk_bytes);
    EXPECT_EQ(PlanEqually(link, 2, codec).window_chunks, raw.window_chunks);
  }
}

TEST(FlowPlanTest, WithoutANetworkThePlanDoesNotDependOnShards) {
  EXPECT_EQ(PlanEqually({}, 1).chunk_bytes, PlanEqually({}, 8).chunk_bytes);
  EXPECT_GE(PlanEqually({}, 1).window_chunks, 8u);
}

}  // namespace
}  // namespace thalweg::flow_plan_test
