// Refusals counts and logs the nodes that a shard does not take, by reason.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "core/base/clock.h"
#include "server/base/log_limit.h"
#include "server/base/metrics.h"

namespace thalweg {

enum class Refusal : uint8_t {
  kSecret,       // whoever names a job has not proved that it knows its secret
  kCertificate,  // the policy knows no tenant with the caller's certificate
  kJob,          // the caller's tenant may not take part in the job, or it is another tenant's
  kQuota,        // the caller's tenant has as many jobs as it may have
  kToken,        // the membership belongs to another certificate
};

// It is thread-safe. Counters of several objects with one registry are the same.
class Refusals {
 public:
  explicit Refusals(MetricRegistry& registry);

  // Counts the refusal and logs `why`, unless too many have been logged in this minute.
  void Add(Refusal reason, const absl::Status& why, TimePoint now);

 private:
  std::array<Counter*, 5> counters_{};  // by reason
  LogLimit log_limit_{"about nodes that were refused"};
};

}  // namespace thalweg
