// A FlightRecord keeps what has become of a node's latest collectives, to say so when a job fails,
// and traces each of them.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/base/clock.h"
#include "core/base/trace.h"
#include "core/exchange/flight_report.h"
#include "core/ipc/message.h"

namespace thalweg {

// Thread-compatible. Keeps the latest kMost collectives; what is said of earlier ones is ignored.
class FlightRecord {
 public:
  static constexpr size_t kMost = 50;

  explicit FlightRecord(JobTrace trace) : trace_(std::move(trace)) {}

  // A worker has come, `rank` in the group; `spec` is what it says, and may have values.
  void NoteCame(const std::string& group, const ipc::Collect& spec, uint32_t rank, TimePoint now);
  // All workers of the node have come, and their values go to the shards.
  void NoteSent(const ipc::Collect& spec, TimePoint now);
  void NoteDone(const ipc::Collect& spec, TimePoint now);

  // Returns what has become of each, the latest one last.
  std::vector<FlightReport> Report(TimePoint now) const;
  // Returns a line for each, the latest one last, e.g. "allreduce 7 of group 'default', mean of
  // 1024 elements of fp32: rank 0 came 2.001 s ago, sent 2.000 s ago, not done".
  std::vector<std::string> Lines(TimePoint now) const;
  // The job has failed: returns them, and traces what is not done as far as it has come.
  std::vector<std::string> Fail(TimePoint now) const;

 private:
  struct Flight {
    std::string group;
    ipc::Collect spec;  // without values
    std::vector<std::pair<uint32_t, TimePoint>> came = {};
    std::optional<TimePoint> sent = {};
    std::optional<TimePoint> done = {};
  };
  Flight* Find(const ipc::Collect& spec);
  void Trace(const Flight& flight, TimePoint end) const;

  const JobTrace trace_;
  std::deque<Flight> flights_;
};

}  // namespace thalweg
