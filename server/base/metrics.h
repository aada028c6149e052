// This header holds counters, gauges and histograms. Any room writes them; server/http exports them
// in Prometheus' text format. Rooms that only count need no metrics library.
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

// A Counter is thread-safe. Additions are relaxed because a reader needs each value by itself and
// no order among them.
class Counter {
 public:
  void Add(double amount = 1) { value_.fetch_add(amount, std::memory_order_relaxed); }
  double Value() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<double> value_{0};
};

// A Gauge is thread-safe.
class Gauge {
 public:
  void Set(double value) { value_.store(value, std::memory_order_relaxed); }
  // Where several owners, one after the other, show what each has of its own: Clear sets 0 when
  // `owner` was the last to show something.
  void Show(double value, const void* owner);
  void Clear(const void* owner);
  void Add(double amount) { value_.fetch_add(amount, std::memory_order_relaxed); }
  double Value() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<double> value_{0};
  Mutex mutex_;
  const void* shown_by_ ABSL_GUARDED_BY(mutex_) = nullptr;
};

// A Histogram counts durations by size. It is thread-safe and lock-free. All histograms have the
// same bounds, so that their buckets can be added up.
class Histogram {
 public:
  static constexpr size_t kBounds = 19;
  // The bounds are powers of two from 0.1 ms, the time of a chunk in memory, to 26 s, longer than
  // any exchange should take.
  static constexpr double Bound(size_t i) { return 1e-4 * static_cast<double>(uint64_t{1} << i); }

  void Observe(double seconds);
  // Returns the observations in (Bound(i - 1), Bound(i)]; with i == kBounds those above all bounds.
  uint64_t Count(size_t i) const { return counts_[i].load(std::memory_order_relaxed); }
  double Sum() const { return sum_.load(std::memory_order_relaxed); }

 private:
  std::array<std::atomic<uint64_t>, kBounds + 1> counts_{};
  std::atomic<double> sum_{0};
};

using Labels = std::map<std::string, std::string>;

// A MetricRegistry owns every metric of a process. It is thread-safe. References stay valid as long
// as the registry.
class MetricRegistry {
 public:
  enum class Kind { kCounter, kGauge, kHistogram };
  struct Sample {
    Labels labels;
    double value = 0;              // for a histogram: the sum
    std::vector<uint64_t> counts;  // for a histogram: see Histogram::Count
  };
  struct Family {
    std::string name;
    std::string help;
    Kind kind;
    std::vector<Sample> samples;
  };

  // Returns the metric with this name and these labels; makes it at first use. `help` is kept from
  // the first call. A name must not be used for several kinds.
  Counter& GetCounter(const std::string& name, const std::string& help, const Labels& labels = {});
  Gauge& GetGauge(const std::string& name, const std::string& help, const Labels& labels = {});
  Histogram& GetHistogram(const std::string& name, const std::string& help,
                          const Labels& labels = {});

  // Returns all current values, sorted by name.
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
