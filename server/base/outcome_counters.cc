#include "server/base/outcome_counters.h"

#include "absl/strings/ascii.h"

namespace thalweg {

OutcomeCounters::OutcomeCounters(MetricRegistry& registry, const std::string& name,
                                 const std::string& help) {
  for (int code = 0; code < kCodes; ++code) {
    const std::string outcome =
        absl::AsciiStrToLower(absl::StatusCodeToString(static_cast<absl::StatusCode>(code)));
    counters_[code] = &registry.GetCounter(name, help, {{"outcome", outcome}});
  }
}

void OutcomeCounters::Add(absl::StatusCode code, double amount) {
  const int raw = static_cast<int>(code);
  const bool is_known = raw >= 0 && raw < kCodes;  // a peer may have sent any number
  counters_[is_known ? raw : static_cast<int>(absl::StatusCode::kUnknown)]->Add(amount);
}

}  // namespace thalweg
