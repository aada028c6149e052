#include "server/base/refusals.h"

#include <spdlog/spdlog.h>

#include "core/base/protocol.h"
#include "server/base/log.h"
#include "server/base/printable.h"

namespace thalweg {
namespace {

constexpr std::array<const char*, 5> kReasons = {"secret", "certificate", "job", "quota", "token"};

}  // namespace

Refusals::Refusals(MetricRegistry& registry) {
  for (size_t i = 0; i < kReasons.size(); ++i) {
    counters_[i] = &registry.GetCounter(
        "thalweg_shard_refused_total",
        "Nodes refused, by what was wrong: proof of the job's secret, certificate, job of another "
        "tenant, tenant's quota of jobs, token of another certificate's membership",
        {{"reason", kReasons[i]}});
  }
}

void Refusals::Add(Refusal reason, const absl::Status& why, TimePoint now) {
  counters_[static_cast<size_t>(reason)]->Add();
  if (log_limit_.Admits(now)) spdlog::warn("refused: {}", Printable(Text(why), kMaxReasonBytes));
}

}  // namespace thalweg
