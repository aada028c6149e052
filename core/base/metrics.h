// Counters and gauges, written by any room and read by server/transport, which exports them in
// Prometheus' text format. Keeps the metrics library out of the rooms that only count.
#pragma once

#include <atomic>
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

using Labels = std::map<std::string, std::string>;

// Owns every metric of a process. Thread-safe. References stay valid as long as the registry.
class MetricRegistry {
 public:
  enum class Kind { kCounter, kGauge };
  struct Sample {
    Labels labels;
    double value;
  };
  struct Family {
    std::string name;
    std::string help;
    Kind kind;
    std::vector<Sample> samples;
  };

  // The metric with this name and these labels, made at first use. `help` is kept from the first
  // call. A name must not be used for both kinds.
  Counter& GetCounter(const std::string& name, const std::string& help, const Labels& labels = {});
  Gauge& GetGauge(const std::string& name, const std::string& help, const Labels& labels = {});

  // All values now, sorted by name.
  std::vector<Family> Snapshot() const;

 private:
  struct FamilyState {
    std::string help;
    Kind kind;
    std::map<Labels, std::unique_ptr<Counter>> counters;
    std::map<Labels, std::unique_ptr<Gauge>> gauges;
  };
  mutable Mutex mutex_;
  std::map<std::string, FamilyState> families_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace thalweg
