// Admission decides by a policy which nodes of other machines a shard takes, and keeps what their
// tenants may use of it.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "core/base/mutex.h"
#include "core/base/tenant.h"
#include "core/exchange/join.h"
#include "server/aggregator/memory_budget.h"
#include "server/base/metrics.h"
#include "server/base/refusals.h"

namespace thalweg {

// A TenantAccount is a tenant's part of a shard. Thread-safe.
struct TenantAccount {
  TenantAccount(const std::string& tenant, MemoryBudget& whole, MetricRegistry& registry);

  const std::string name;
  std::atomic<uint32_t> max_jobs;
  MemoryBudget memory;
};

// An Admission is thread-safe.
class Admission {
 public:
  // Without `policy` everybody is taken. `memory`, of which tenants get a part, and `registry` must
  // outlive the object.
  Admission(PolicySource policy, MemoryBudget& memory, MetricRegistry& registry)
      : policy_(std::move(policy)), memory_(memory), registry_(registry), refusals_(registry) {}

  // Returns the account of the tenant to which the node's certificate belongs, with today's quotas;
  // null if there is no policy or the node is in this process. PermissionDenied names the
  // certificate and the job, and says what the policy allows.
  absl::StatusOr<std::shared_ptr<TenantAccount>> Find(const JoinRequest& request, TimePoint now);

  // Returns OK if a node of tenant `account` may join the job, which is that of `owner` (null: of
  // no tenant yet), while the tenant has `num_jobs` jobs. PermissionDenied: the job is another
  // tenant's. ResourceExhausted: the tenant may have no further job.
  absl::Status Check(const std::string& job, const TenantAccount& account,
                     const TenantAccount* owner, size_t num_jobs, TimePoint now);

 private:
  absl::Status Refuse(Refusal reason, absl::Status why, TimePoint now);

  const PolicySource policy_;
  MemoryBudget& memory_;
  MetricRegistry& registry_;
  Refusals refusals_;

  Mutex mutex_;
  // By name. Accounts are kept: there are no more than policies have named.
  std::map<std::string, std::shared_ptr<TenantAccount>> accounts_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace thalweg
