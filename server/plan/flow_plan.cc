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
constexpr double kChunksPerShard = 4;  // of an average share, in all windows of a node
constexpr uint32_t kSmallestWindow = 6;
constexpr uint32_t kLargestWindow = 64;

}  // namespace

FlowPlan PlanFlow(const LinkSpeed& slowest, std::span<const uint32_t> shares, DType wire) {
  const uint64_t raw_per_wire = SizeOf(DType::kFloat32) / SizeOf(wire);
  const double rate = slowest.bytes_per_second;
  if (rate <= 0) return {raw_per_wire * kLocalChunk, kLargestWindow};
  const double num_shards = static_cast<double>(shares.size()) -
                            static_cast<double>(std::count(shares.begin(), shares.end(), 0u));
  const double in_flight =
      std::min(rate * kWindowSeconds, std::max(kCachedWindow, rate * kShortestWindowSeconds)) +
      rate * 2 * ToSeconds(slowest.round_trip);
  const double wanted = std::min(
      {rate * kChunkSeconds, in_flight / (kChunksPerShard * num_shards), 1.0 * kLargestChunk});
  const uint64_t chunk = std::max(kSmallestChunk, std::bit_floor(static_cast<uint64_t>(wanted)));
  const double largest_share = *std::max_element(shares.begin(), shares.end()) /
                               std::accumulate(shares.begin(), shares.end(), 0.0);
  const double chunks = std::ceil(in_flight / static_cast<double>(chunk) * largest_share);
  const double window = std::clamp<double>(chunks, kSmallestWindow, kLargestWindow);
  return {raw_per_wire * chunk, static_cast<uint32_t>(window)};
}

}  // namespace thalweg
