// OutcomeCounters counts outcomes by a label: "ok", or the failure's code in lower case, such as
// "deadline_exceeded".
#pragma once

#include <array>
#include <string>

#include "absl/status/status.h"
#include "server/base/metrics.h"

namespace thalweg {

// It is thread-safe. All outcomes exist from the beginning, so that the first failure is visible as
// an increase.
class OutcomeCounters {
 public:
  OutcomeCounters(MetricRegistry& registry, const std::string& name, const std::string& help);

  void Add(absl::StatusCode code, double amount = 1);
  double Value(absl::StatusCode code) const { return counters_[static_cast<int>(code)]->Value(); }

 private:
  static constexpr int kCodes = static_cast<int>(absl::StatusCode::kUnauthenticated) + 1;

  std::array<Counter*, kCodes> counters_{};  // by code
};

}  // namespace thalweg
