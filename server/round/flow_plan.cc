#include "server/round/flow_plan.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace thalweg {
namespace {

constexpr double kChunkSeconds = 0.004;
constexpr uint64_t kSmallestChunk = 16 << 10;
constexpr uint64_t kLargestChunk = 1 << 20;
constexpr uint64_t kLocalChunk = 256 << 10;
constexpr double kWindowSeconds = 0.1;
constexpr uint32_t kSmallestWindow = 8;
constexpr uint32_t kLargestWindow = 64;

}  // namespace

FlowPlan PlanFlow(const LinkSpeed& slowest, uint32_t num_shards, DType wire) {
  const uint64_t raw_per_wire = SizeOf(DType::kFloat32) / SizeOf(wire);
  if (slowest.bytes_per_second <= 0) return {raw_per_wire * kLocalChunk, kLargestWindow};
  const double wanted = std::min(slowest.bytes_per_second * kChunkSeconds, 1.0 * kLargestChunk);
  const uint64_t chunk = std::max(kSmallestChunk, std::bit_floor(static_cast<uint64_t>(wanted)));
  const double seconds = kWindowSeconds + 2 * ToSeconds(slowest.round_trip);
  const double chunks =
      std::ceil(slowest.bytes_per_second * seconds / static_cast<double>(chunk * num_shards));
  const double window = std::clamp<double>(chunks, kSmallestWindow, kLargestWindow);
  return {raw_per_wire * chunk, static_cast<uint32_t>(window)};
}

}  // namespace thalweg
