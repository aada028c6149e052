// JobMemory reserves a job's memory, the shard's or its tenant's, and shows it in gauges.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "core/exchange/join.h"
#include "server/aggregator/admission.h"
#include "server/aggregator/letters.h"
#include "server/aggregator/memory_budget.h"
#include "server/aggregator/shard_metrics.h"
#include "server/plan/job_plan.h"
#include "server/round/job_rounds.h"

namespace thalweg {

// Thread-compatible.
class JobMemory {
 public:
  // A Job's parts say what it needs.
  struct Parts {
    const JobPlan& plan;
    const JobRounds& rounds;
    const Letters& letters;
  };
  // All but `first` must outlive it.
  JobMemory(const JoinRequest& first, const Parts& parts, MemoryBudget& memory,
            ShardMetrics& metrics);

  // Returns about how much memory a job takes by itself, whatever its nodes do.
  static uint64_t OwnBytes(const JoinRequest& first);

  // From now on the tenant's memory is reserved, unless the job is a tenant's already.
  void ChargeTo(std::shared_ptr<TenantAccount> account);
  const std::shared_ptr<TenantAccount>& account() const { return account_; }  // null: no tenant's

  // Reserves what the job will need as far as it is known: what it takes by itself, windows with
  // their results, layouts, residuals. Call it when more of them are allowed, before they are used;
  // when this or one of the next two fails, the job must fail. Errors as
  // MemoryBudget::Reservation::Resize.
  absl::Status Reserve();
  // Does so if chunks have got states.
  absl::Status ReserveStates();
  // Does so for nodes with so many streams, on which results are kept.
  absl::Status ReserveStreams(uint32_t streams);
  // Does so for copies of weights, which snapshots need. When it fails, the job goes on without.
  absl::Status ReserveCopies();
  bool has_copies() const { return has_copies_; }
  uint64_t reserved_bytes() const { return reservation_->bytes(); }

  // Shows what the job holds at the moment, which gauges sum over jobs.
  void Show();
  // The job is over: gives the reservation back, and holds nothing that waits.
  void End();

 private:
  // What a job holds at a moment.
  struct Held {
    uint64_t bytes = 0;        // of rounds that wait
    uint64_t limit_bytes = 0;  // most that its windows let it hold
    uint64_t state_bytes = 0;  // of what is kept of chunks
  };
  void Show(const Held& held);

  const uint64_t own_bytes_;
  const uint32_t shard_;
  const uint32_t num_nodes_;
  const Parts parts_;
  ShardMetrics& metrics_;
  std::shared_ptr<TenantAccount> account_;
  std::optional<MemoryBudget::Reservation> reservation_;  // of either; never empty
  Held shown_;
  uint64_t states_ = 0;        // bytes that are reserved for them
  uint32_t most_streams_ = 1;  // of a node
  bool has_copies_ = false;
};

}  // namespace thalweg
