// JobMemory reserves a job's memory, the shard's or its tenant's, and shows it in gauges.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "core/exchange/join.h"
#include "server/aggregator/admission.h"
#include "server/aggregator/memory_budget.h"
#include "server/aggregator/shard_metrics.h"

namespace thalweg {

// Thread-compatible.
class JobMemory {
 public:
  // `memory` and `metrics` must outlive it.
  JobMemory(const JoinRequest& first, MemoryBudget& memory, ShardMetrics& metrics);

  // Returns about how much memory a job takes by itself, whatever its nodes do.
  static uint64_t OwnBytes(const JoinRequest& first);
  uint64_t own_bytes() const { return own_bytes_; }

  // From now on the tenant's memory is reserved, unless the job is a tenant's already.
  void ChargeTo(std::shared_ptr<TenantAccount> account);
  const std::shared_ptr<TenantAccount>& account() const { return account_; }  // null: no tenant's

  // Reserves so much, and what the job takes by itself, in place of what was reserved before.
  // Errors as MemoryBudget::Reservation::Resize.
  absl::Status Reserve(uint64_t bytes) { return reservation_->Resize(own_bytes_ + bytes); }
  void Release() { reservation_->Release(); }
  uint64_t reserved_bytes() const { return reservation_->bytes(); }

  // What a job holds at a moment, which gauges sum over jobs.
  struct Held {
    uint64_t bytes = 0;        // of rounds that wait
    uint64_t limit_bytes = 0;  // most that its windows let it hold
    uint64_t state_bytes = 0;  // of what is kept of chunks
  };
  void Show(const Held& held);

 private:
  const uint64_t own_bytes_;
  ShardMetrics& metrics_;
  std::shared_ptr<TenantAccount> account_;
  std::optional<MemoryBudget::Reservation> reservation_;  // of either; never empty
  Held shown_;
};

}  // namespace thalweg
