// A FlightReport says what has become of one collective on a node, as its sidecar's API tells it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/base/clock.h"

namespace thalweg {

// All durations say how long ago something happened; none: not yet.
struct FlightReport {
  struct Arrival {
    uint32_t rank = 0;  // in the collective's group
    Duration ago{};
  };
  std::string name;           // e.g. "allreduce 7 of group 'default'"
  std::string what;           // e.g. "mean of 1024 elements of fp32"
  std::vector<Arrival> came;  // workers of this node
  std::optional<Duration> sent;
  std::optional<Duration> done;
};

// The latest collectives of a job on one node, the oldest first.
struct JobFlights {
  std::string job;
  uint32_t node = 0;
  std::vector<FlightReport> flights;
};

}  // namespace thalweg
