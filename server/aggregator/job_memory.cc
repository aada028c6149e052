#include "server/aggregator/job_memory.h"

#include <utility>

#include "core/base/protocol.h"

namespace thalweg {

JobMemory::JobMemory(const JoinRequest& first, MemoryBudget& memory, ShardMetrics& metrics)
    : own_bytes_(OwnBytes(first)), metrics_(metrics), reservation_(std::in_place, memory) {}

uint64_t JobMemory::OwnBytes(const JoinRequest& first) {
  // Beside the objects: a node has its name three times, a shard some numbers in LinkRates, its
  // host, its share and the reports of these, and a policy is kept parsed, and as text in reports.
  constexpr uint64_t kOfJob = 16 << 10;
  constexpr uint64_t kOfNode = 3 * kMaxNameBytes;
  constexpr uint64_t kOfShard = 96;
  constexpr uint64_t kTimesPolicy = 8;
  return kOfJob + first.num_nodes * kOfNode + first.num_shards * kOfShard +
         first.codec.ToString().size() * kTimesPolicy;
}

void JobMemory::ChargeTo(std::shared_ptr<TenantAccount> account) {
  if (account_ != nullptr || account == nullptr) return;
  account_ = std::move(account);
  reservation_.emplace(account_->memory);
}

void JobMemory::Show(const Held& held) {
  const auto show = [](Gauge& gauge, uint64_t bytes, uint64_t shown) {
    if (bytes != shown) gauge.Add(static_cast<double>(bytes) - static_cast<double>(shown));
  };
  show(metrics_.held_bytes, held.bytes, shown_.bytes);
  show(metrics_.held_limit_bytes, held.limit_bytes, shown_.limit_bytes);
  show(metrics_.residual_bytes, held.state_bytes, shown_.state_bytes);
  shown_ = held;
}

}  // namespace thalweg
