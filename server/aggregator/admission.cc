#include "server/aggregator/admission.h"

#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/protocol.h"
#include "server/base/printable.h"

namespace thalweg {
namespace {

std::string Quoted(const std::vector<std::string>& texts) {
  return absl::StrCat("'", absl::StrJoin(texts, "', '"), "'");
}

std::string CertificateText(const PeerNames& names) {
  const std::string principal = names.Principal();
  if (principal.empty()) return "a caller whose certificate has no name";
  return absl::StrCat("certificate '", Printable(principal, kMaxNameBytes), "'");
}

}  // namespace

TenantAccount::TenantAccount(const std::string& tenant, MemoryBudget& whole,
                             MetricRegistry& registry)
    : name(tenant),
      max_jobs(std::numeric_limits<uint32_t>::max()),
      memory(std::numeric_limits<uint64_t>::max(),
             registry.GetGauge("thalweg_shard_tenant_memory_reserved_bytes",
                               "Memory that a tenant's jobs have reserved, by tenant of the policy",
                               {{"tenant", tenant}}),
             absl::StrCat("the quota of tenant '", tenant, "'"), &whole) {}

absl::StatusOr<std::shared_ptr<TenantAccount>> Admission::Find(const JoinRequest& request,
                                                               TimePoint now) {
  if (policy_ == nullptr || !request.peer) return nullptr;
  const std::shared_ptr<const Policy> policy = policy_();
  const std::string who = CertificateText(*request.peer);
  const Tenant* tenant = policy->Find(*request.peer);
  if (tenant == nullptr) {
    return Refuse(Refusal::kCertificate,
                  absl::PermissionDeniedError(
                      absl::StrCat("job '", request.job, "': ", who,
                                   " belongs to none of the tenants of this shard's policy")),
                  now);
  }
  if (!tenant->MayJoin(request.job)) {
    return Refuse(Refusal::kJob,
                  absl::PermissionDeniedError(absl::StrCat(
                      "job '", request.job, "': ", who, " belongs to tenant '", tenant->name,
                      "', which may take part in jobs ", Quoted(tenant->jobs), " only")),
                  now);
  }
  MutexLock lock(mutex_);
  std::shared_ptr<TenantAccount>& account = accounts_[tenant->name];
  if (account == nullptr) {
    account = std::make_shared<TenantAccount>(tenant->name, memory_, registry_);
  }
  account->max_jobs = tenant->max_jobs.value_or(std::numeric_limits<uint32_t>::max());
  account->memory.SetLimit(tenant->max_memory_bytes.value_or(std::numeric_limits<uint64_t>::max()));
  return account;
}

absl::Status Admission::Check(const std::string& job, const TenantAccount& account,
                              const TenantAccount* owner, size_t num_jobs, TimePoint now) {
  if (owner == &account) return absl::OkStatus();
  if (owner != nullptr) {
    return Refuse(Refusal::kJob,
                  absl::PermissionDeniedError(
                      absl::StrCat("job '", job, "' belongs to tenant '", owner->name,
                                   "', and the node's certificate to tenant '", account.name, "'")),
                  now);
  }
  const uint32_t most = account.max_jobs;
  if (num_jobs < most) return absl::OkStatus();
  return Refuse(Refusal::kQuota,
                absl::ResourceExhaustedError(
                    absl::StrCat("job '", job, "': tenant '", account.name, "' has ", num_jobs,
                                 " jobs on this shard, and its quota is ", most, " at a time")),
                now);
}

absl::Status Admission::Refuse(Refusal reason, absl::Status why, TimePoint now) {
  refusals_.Add(reason, why, now);
  return why;
}

}  // namespace thalweg
