#include "core/base/metrics.h"

namespace thalweg {

Counter& MetricRegistry::GetCounter(const std::string& name, const std::string& help,
                                    const Labels& labels) {
  MutexLock lock(mutex_);
  auto [family, is_new] = families_.try_emplace(name, FamilyState{help, Kind::kCounter, {}, {}});
  std::unique_ptr<Counter>& counter = family->second.counters[labels];
  if (counter == nullptr) counter = std::make_unique<Counter>();
  return *counter;
}

Gauge& MetricRegistry::GetGauge(const std::string& name, const std::string& help,
                                const Labels& labels) {
  MutexLock lock(mutex_);
  auto [family, is_new] = families_.try_emplace(name, FamilyState{help, Kind::kGauge, {}, {}});
  std::unique_ptr<Gauge>& gauge = family->second.gauges[labels];
  if (gauge == nullptr) gauge = std::make_unique<Gauge>();
  return *gauge;
}

std::vector<MetricRegistry::Family> MetricRegistry::Snapshot() const {
  MutexLock lock(mutex_);
  std::vector<Family> families;
  for (const auto& [name, state] : families_) {
    Family family{name, state.help, state.kind, {}};
    for (const auto& [labels, counter] : state.counters) {
      family.samples.push_back({labels, counter->Value()});
    }
    for (const auto& [labels, gauge] : state.gauges) {
      family.samples.push_back({labels, gauge->Value()});
    }
    families.push_back(std::move(family));
  }
  return families;
}

}  // namespace thalweg
