#include "server/plan/flow_plan.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

#include "core/exchange/collective.h"

namespace thalweg {
namespace {

constexpr double kChunkSeconds = 0.004;
constexpr uint64_t kSmallestChunk = 16 << 10;
constexpr uint64_t kLargestChunk = 1 << 20;
constexpr uint64_t kLocalChunk = 256 << 10;
constexpr double kWindowSeconds = 0.04;
constexpr double kCachedWindow = 4 << 20;
constexpr double kShortestWindowSeconds = 0.002;
// All windows of a node together have so many chunks for each shard. Where shares differ they have
// more, so that a small share's window has a few chunks as well.
constexpr double kChunksPerShard = 4;
constexpr double kChunksPerUnequalShard = 6;
constexpr uint32_t kSmallestWindow = 6;
constexpr uint32_t kLargestWindow = 64;

// Returns the largest part by which a window differs from its share, where the largest share's has
// so many chunks.
double RoundingOf(uint32_t most, std::span<const uint32_t> shares) {
  const double largest = *std::max_element(shares.begin(), shares.end());
  const std::vector<uint32_t> windows = WindowsOf(shares, most);
  double worst = 0;
  for (size_t k = 0; k < shares.size(); ++k) {
    if (shares[k] == 0) continue;
    const double exact = most * shares[k] / largest;
    worst = std::max(worst, std::abs(windows[k] - exact) / exact);
  }
  return worst;
}

// Returns the window from `least` to half as much more for which rounding is the smallest.
uint32_t RoundWindow(uint32_t least, std::span<const uint32_t> shares) {
  uint32_t best = least;
  for (uint32_t window = least; window <= std::min(least + least / 2, kLargestWindow); ++window) {
    if (RoundingOf(best, shares) - RoundingOf(window, shares) > 1e-9) best = window;
  }
  return best;
}

}  // namespace

std::vector<uint32_t> WindowsOf(std::span<const uint32_t> shares, uint32_t most) {
  const double largest = *std::max_element(shares.begin(), shares.end());
  std::vector<uint32_t> windows;
  for (const uint32_t share : shares) {
    const auto window = static_cast<uint32_t>(std::lround(most * share / largest));
    windows.push_back(std::min(std::max(window, kLeastWindow), most));
  }
  return windows;
}

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
