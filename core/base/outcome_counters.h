// A counter with a label that says how something ended: "ok", or the code of its failure in lower
// case, "deadline_exceeded".
#pragma once

#include <array>
#include <string>

#include "absl/status/status.h"
#include "core/base/metrics.h"

namespace thalweg {

// Thread-safe. All outcomes are there from the beginning, so that the first failure is seen to be
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
