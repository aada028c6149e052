#include "server/base/metrics.h"

namespace thalweg {
namespace {

template <typename Metric>
Metric& GetOrMake(std::map<Labels, std::unique_ptr<Metric>>& metrics, const Labels& labels) {
  std::unique_ptr<Metric>& metric = metrics[labels];
  if (metric == nullptr) metric = std::make_unique<Metric>();
  return *metric;
}

}  // namespace

void Gauge::Show(double value, const void* owner) {
  MutexLock lock(mutex_);
  shown_by_ = owner;
  Set(value);
}

void Gauge::Clear(const void* owner) {
  MutexLock lock(mutex_);
  if (shown_by_ == owner) Set(0);
}

void Histogram::Observe(double seconds) {
  size_t i = 0;
  while (i < kBounds && seconds > Bound(i)) ++i;
  counts_[i].fetch_add(1, std::memory_order_relaxed);
  sum_.fetch_add(seconds, std::memory_order_relaxed);
}

MetricRegistry::FamilyState& MetricRegistry::FamilyLocked(const std::string& name,
                                                          const std::string& help, Kind kind) {
  return families_.try_emplace(name, FamilyState{help, kind, {}, {}, {}}).first->second;
}

Counter& MetricRegistry::GetCounter(const std::string& name, const std::string& help,
                                    const Labels& labels) {
  MutexLock lock(mutex_);
  return GetOrMake(FamilyLocked(name, help, Kind::kCounter).counters, labels);
}

Gauge& MetricRegistry::GetGauge(const std::string& name, const std::string& help,
                                const Labels& labels) {
  MutexLock lock(mutex_);
  return GetOrMake(FamilyLocked(name, help, Kind::kGauge).gauges, labels);
}

Histogram& MetricRegistry::GetHistogram(const std::string& name, const std::string& help,
                                        const Labels& labels) {
  MutexLock lock(mutex_);
  return GetOrMake(FamilyLocked(name, help, Kind::kHistogram).histograms, labels);
}

std::vector<MetricRegistry::Family> MetricRegistry::Snapshot() const {
  MutexLock lock(mutex_);
  std::vector<Family> families;
  for (const auto& [name, state] : families_) {
    Family family{name, state.help, state.kind, {}};
    for (const auto& [labels, counter] : state.counters) {
      family.samples.push_back({labels, counter->Value(), {}});
    }
    for (const auto& [labels, gauge] : state.gauges) {
      family.samples.push_back({labels, gauge->Value(), {}});
    }
    for (const auto& [labels, histogram] : state.histograms) {
      Sample& sample = family.samples.emplace_back(Sample{labels, histogram->Sum(), {}});
      for (size_t i = 0; i <= Histogram::kBounds; ++i) {
        sample.counts.push_back(histogram->Count(i));
      }
    }
    families.push_back(std::move(family));
  }
  return families;
}

}  // namespace thalweg
