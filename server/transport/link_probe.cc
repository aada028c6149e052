#include "server/transport/link_probe.h"

#include <algorithm>
#include <chrono>
#include <vector>

#include "core/base/status_macros.h"

namespace thalweg {
namespace {

constexpr int kEmptyCalls = 5;
// Empty calls stop after this time: when the round trip is long, few samples measure it well
// enough.
constexpr Duration kEmptyCallsTime = std::chrono::milliseconds(50);
constexpr size_t kFirstBytes = 64 << 10;
// A call with at least this time on the wire makes the cost of thread scheduling negligible.
constexpr Duration kTimeOnWire = std::chrono::milliseconds(20);
// The median of this many such calls counts. A thread that waits for a core makes a call longer,
// and the next one shorter, because a token bucket fills up meanwhile.
constexpr size_t kTimedCalls = 5;

absl::StatusOr<Duration> RoundTrip(const ProbeCall& call) {
  Duration least = Duration::max();
  Duration spent{};
  for (int i = 0; i < kEmptyCalls && spent < kEmptyCallsTime; ++i) {
    THALWEG_ASSIGN_OR_RETURN(const Duration took, call(0));
    least = std::min(least, took);
    spent += took;
  }
  return least;
}

}  // namespace

absl::StatusOr<LinkSpeed> ProbeLink(const ProbeCall& call) {
  THALWEG_ASSIGN_OR_RETURN(const Duration round_trip, RoundTrip(call));
  // On links with a long round trip, TCP's slow start and the growth of flow control windows cost
  // further round trips; a call of at least four more makes that negligible too.
  const Duration enough = kTimeOnWire + 4 * round_trip;
  size_t bytes = kFirstBytes;
  size_t spent = 0;
  std::vector<double> rates;
  while (rates.size() < kTimedCalls) {
    THALWEG_ASSIGN_OR_RETURN(const Duration took, call(bytes));
    const bool measurable = took >= enough || bytes == kMaxProbeBytes;
    if (measurable && spent >= kFreeBurstBytes) {
      const Duration on_wire = std::max<Duration>(took - round_trip, std::chrono::microseconds(1));
      rates.push_back(static_cast<double>(bytes) / ToSeconds(on_wire));
    }
    spent += bytes;
    if (!measurable) bytes = std::min(2 * bytes, kMaxProbeBytes);
  }
  const auto median = rates.begin() + kTimedCalls / 2;
  std::nth_element(rates.begin(), median, rates.end());
  return LinkSpeed{*median, round_trip};
}

}  // namespace thalweg
