// Counters, gauges and histograms, written by any room and read by server/transport, which exports
// them in Prometheus' text format. Keeps the metrics library out of the rooms that only count.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/base/mutex.h"

namespace thalweg {

// Thread-safe; additions are relaxed because a reader needs each value alone, not an order among
// them.
class Counter {
 public:
  void Add(double amount = 1) { value_.fetch_add(amount, std::memory_order_relaxed); }
  double Value() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<double> value_{0};
};

class Gauge {
 public:
  void Set(double value) { value_.store(value, std::memory_order_relaxed); }
  void Add(double amount) { value_.fetch_add(amount, std::memory_order_relaxed); }
  double Value() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<double> value_{0};
};

// How long something took, by size. Thread-safe and lock-free. All histograms have the same bounds,
// so that their buckets can be added up.
class Histogram {
 public:
  static constexpr size_t kBounds = 19;
  // Powers of two from 0.1 ms to 26 s: what a chunk takes in memory, and what no exchange should.
  static constexpr double Bound(size_t i) { return 1e-4 * static_cast<double>(uint64_t{1} << i); }

  void Observe(double seconds);
  // Observations in (Bound(i - 1), Bound(i)]; with i == kBounds those above all bounds.
  uint64_t Count(size_t i) const { return counts_[i].load(std::memory_order_relaxed); }
  double Sum() const { return sum_.load(std::memory_order_relaxed); }

 private:
  std::array<std::atomic<uint64_t>, kBounds + 1> counts_{};
  std::atomic<double> sum_{0};
};

using Labels = std::map<std::string, std::string>;

// Owns every metric of a process. Thread-safe. References stay valid as long as the registry.
class MetricRegistry {
 public:
  enum class Kind { kCounter, kGauge, kHistogram };
  struct Sample {
    Labels labels;
    double value = 0;              // of a histogram: the sum
    std::vector<uint64_t> counts;  // of a histogram: as Count
  };
  struct Family {
    std::string name;
    std::string help;
    Kind kind;
    std::vector<Sample> samples;
  };

  // The metric with this name and these labels, made at first use. `help` is kept from the first
  // call. A name must not be used for several kinds.
  Counter& GetCounter(const std::string& name, const std::string& help, const Labels& labels = {});
  Gauge& GetGauge(const std::string& name, const std::string& help, const Labels& labels = {});
  Histogram& GetHistogram(const std::string& name, const std::string& help,
                          const Labels& labels = {});

  // All values now, sorted by name.
  std::vector<Family> Snapshot() const;

 private:
  struct FamilyState {
    std::string help;
    Kind kind;
    std::map<Labels, std::unique_ptr<Counter>> counters;
    std::map<Labels, std::unique_ptr<Gauge>> gauges;
    std::map<Labels, std::unique_ptr<Histogram>> histograms;
  };
  FamilyState& FamilyLocked(const std::string& name, const std::string& help, Kind kind)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable Mutex mutex_;
  std::map<std::string, FamilyState> families_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace thalweg
