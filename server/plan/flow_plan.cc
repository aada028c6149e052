#include "server/plan/flow_plan.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

namespace thalweg {
namespace {

constexpr double kChunkSeconds = 0.004;
constexpr uint64_t kSmallestChunk = 16 << 10;
constexpr uint64_t kLargestChunk = 1 << 20;
constexpr uint64_t kLocalChunk = 256 << 10;
constexpr double kWindowSeconds = 0.04;
constexpr double kCachedWindow = 4 << 20;
constexpr double kShortestWindowSeconds = 0.002;
// Of an average share, in all windows of a node; more where shares differ, so that those of small
// shares have a few chunks as well.
constexpr double kChunksPerShard = 4;
constexpr double kChunksPerUnequalShard = 6;
constexpr uint32_t kSmallestWindow = 6;
constexpr uint32_t kLargestWindow = 64;

// Returns how far the windows of the other shards are from their shares, where the largest share's
// has so many chunks: the largest part by which one differs.
double RoundingOf(uint32_t window, std::span<const uint32_t> shares, double largest) {
  double worst = 0;
  for (const uint32_t share : shares) {
    if (share == 0) continue;
    const double exact = window * share / largest;
    worst = std::max(worst, std::abs(std::max(2.0, std::round(exact)) - exact) / exact);
  }
  return worst;
}

// Returns the window from `least` to half as much more for which rounding is the smallest.
uint32_t RoundWindow(uint32_t least, std::span<const uint32_t> shares) {
  const double largest = *std::max_element(shares.begin(), shares.end());
  uint32_t best = least;
  for (uint32_t window = least; window <= std::min(least + least / 2, kLargestWindow); ++window) {
    const double better = RoundingOf(best, shares, largest) - RoundingOf(window, shares, largest);
    if (better > 1e-9) best = window;
  }
  return best;
}

}  // namespace

FlowPlan PlanFlow(const LinkSpeed& slowest, std::span<const uint32_t> shares, DType wire) {
  const uint64_t raw_per_wire = SizeOf(DType::kFloat32) / SizeOf(wire);
  const double rate = slowest.bytes_per_second;
  if (rate <= 0) return {raw_per_wire * kLocalChunk, kLargestWindow};
  const uint32_t largest = *std::max_element(shares.begin(), shares.end());
  const double num_shards = static_cast<double>(shares.size()) -
                            static_cast<double>(std::count(shares.begin(), shares.end(), 0u));
  const double in_flight =
      std::min(rate * kWindowSeconds, std::max(kCachedWindow, rate * kShortestWindowSeconds)) +
      rate * 2 * ToSeconds(slowest.round_trip);
  const bool is_equal =
      std::ranges::all_of(shares, [&](uint32_t share) { return share == 0 || share == largest; });
  const double chunks_per_shard = is_equal ? kChunksPerShard : kChunksPerUnequalShard;
  const double wanted = std::min(
      {rate * kChunkSeconds, in_flight / (chunks_per_shard * num_shards), 1.0 * kLargestChunk});
  const uint64_t chunk = std::max(kSmallestChunk, std::bit_floor(static_cast<uint64_t>(wanted)));
  const double largest_share = largest / std::accumulate(shares.begin(), shares.end(), 0.0);
  const double chunks = std::ceil(in_flight / static_cast<double>(chunk) * largest_share);
  const double window = std::clamp<double>(chunks, kSmallestWindow, kLargestWindow);
  return {raw_per_wire * chunk, RoundWindow(static_cast<uint32_t>(window), shares)};
}

}  // namespace thalweg
