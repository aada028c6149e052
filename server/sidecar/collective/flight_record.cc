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
    if (!flight.done) Trace(flight, now);
  }
  return Lines(now);
}

void FlightRecord::Trace(const Flight& flight, TimePoint end) const {
  if (!trace_) return;
  TraceSubject what;
  what.collective = absl::StrCat(NameOf(flight.spec, flight.group), ", ", TextOf(flight.spec));
  what.raw_bytes = flight.spec.elems * SizeOf(flight.spec.dtype);
  trace_.Wait("wait_workers", flight.came.front().second, flight.sent.value_or(end), what);
  if (flight.sent) trace_.Wait("exchange", *flight.sent, end, std::move(what));
}

std::vector<FlightReport> FlightRecord::Report(TimePoint now) const {
  const auto ago = [now](const std::optional<TimePoint>& then) {
    return then ? std::optional(now - *then) : std::nullopt;
  };
  std::vector<FlightReport> reports;
  for (const Flight& flight : flights_) {
    FlightReport report{.name = NameOf(flight.spec, flight.group),
                        .what = TextOf(flight.spec),
                        .came = {},
                        .sent = ago(flight.sent),
                        .done = ago(flight.done)};
    for (const auto& [rank, when] : flight.came) report.came.push_back({rank, now - when});
    reports.push_back(std::move(report));
  }
  return reports;
}

std::vector<std::string> FlightRecord::Lines(TimePoint now) const {
  const auto ago = [](Duration passed) { return absl::StrFormat("%.3f s ago", ToSeconds(passed)); };
  const auto stage = [&](const char* what, const std::optional<Duration>& passed) {
    return passed ? absl::StrCat(", ", what, " ", ago(*passed)) : absl::StrCat(", not ", what);
  };
  std::vector<std::string> lines;
  for (const FlightReport& flight : Report(now)) {
    std::string line = absl::StrCat(flight.name, ", ", flight.what);
    const char* separator = ": ";
    for (const FlightReport::Arrival& arrival : flight.came) {
      absl::StrAppend(&line, separator, "rank ", arrival.rank, " came ", ago(arrival.ago));
      separator = ", ";
    }
    lines.push_back(line + stage("sent", flight.sent) + stage("done", flight.done));
  }
  return lines;
}

}  // namespace thalweg
