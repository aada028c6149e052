#include "server/sidecar/collective/flight_record.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/sidecar/collective/collective_text.h"

namespace thalweg {

FlightRecord::Flight* FlightRecord::Find(const ipc::Collect& spec) {
  const auto found = std::find_if(flights_.rbegin(), flights_.rend(), [&](const Flight& flight) {
    return flight.spec.group == spec.group && flight.spec.sequence == spec.sequence;
  });
  return found == flights_.rend() ? nullptr : &*found;
}

void FlightRecord::NoteCame(const std::string& group, const ipc::Collect& spec, uint32_t rank,
                            TimePoint now) {
  Flight* flight = Find(spec);
  if (flight == nullptr) {
    if (flights_.size() == kMost) flights_.pop_front();
    flight = &flights_.emplace_back();
    flight->group = group;
    flight->spec = {.group = spec.group,
                    .sequence = spec.sequence,
                    .kind = spec.kind,
                    .fold = spec.fold,
                    .dtype = spec.dtype,
                    .root = spec.root,
                    .elems = spec.elems,
                    .values = {}};
  }
  flight->came.emplace_back(rank, now);
}

void FlightRecord::NoteSent(const ipc::Collect& spec, TimePoint now) {
  if (Flight* const flight = Find(spec); flight != nullptr) flight->sent = now;
}

void FlightRecord::NoteDone(const ipc::Collect& spec, TimePoint now) {
  Flight* const flight = Find(spec);
  if (flight == nullptr) return;
  flight->done = now;
  Trace(*flight, now);
}

std::vector<std::string> FlightRecord::Fail(TimePoint now) const {
  for (const Flight& flight : flights_) {
    if (flight.done == TimePoint()) Trace(flight, now);
  }
  return Lines(now);
}

void FlightRecord::Trace(const Flight& flight, TimePoint end) const {
  if (!trace_) return;
  const bool is_sent = flight.sent != TimePoint();
  TraceSubject what;
  what.collective = absl::StrCat(NameOf(flight.spec, flight.group), ", ", TextOf(flight.spec));
  what.raw_bytes = flight.spec.elems * SizeOf(flight.spec.dtype);
  trace_.Wait("wait_workers", flight.came.front().second, is_sent ? flight.sent : end, what);
  if (is_sent) trace_.Wait("exchange", flight.sent, end, std::move(what));
}

std::vector<std::string> FlightRecord::Lines(TimePoint now) const {
  const auto ago = [&](TimePoint then) {
    return absl::StrFormat("%.3f s ago", ToSeconds(now - then));
  };
  const auto stage = [&](const char* what, TimePoint then) {
    return then == TimePoint() ? absl::StrCat(", not ", what)
                               : absl::StrCat(", ", what, " ", ago(then));
  };
  std::vector<std::string> lines;
  for (const Flight& flight : flights_) {
    std::string line = absl::StrCat(NameOf(flight.spec, flight.group), ", ", TextOf(flight.spec));
    const char* separator = ": ";
    for (const auto& [rank, when] : flight.came) {
      absl::StrAppend(&line, separator, "rank ", rank, " came ", ago(when));
      separator = ", ";
    }
    lines.push_back(line + stage("sent", flight.sent) + stage("done", flight.done));
  }
  return lines;
}

}  // namespace thalweg
