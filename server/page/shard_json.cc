#include "server/page/shard_json.h"

#include <chrono>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "core/base/protocol.h"

namespace thalweg {
namespace {

using Json = nlohmann::ordered_json;

// A list of jobs has so much of each one's policy, which may have 64 KiB.
constexpr size_t kMaxListedCodec = 1024;

std::string Dump(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

Json ToJson(const Volume& volume) {
  return {{"raw_bytes", volume.raw_bytes}, {"wire_bytes", volume.wire_bytes}};
}

const char* Name(NodeReport::State state) {
  switch (state) {
    case NodeReport::State::kMissing:
      return "missing";
    case NodeReport::State::kActive:
      return "active";
    case NodeReport::State::kLeft:
      return "left";
  }
  return "";
}

const char* Name(JobReport::State state) {
  switch (state) {
    case JobReport::State::kGathering:
      return "gathering";
    case JobReport::State::kRunning:
      return "running";
    case JobReport::State::kFailed:
      return "failed";
  }
  return "";
}

Json ToJson(const NodeReport& node, size_t number) {
  return {{"node", number},
          {"name", node.name},
          {"state", Name(node.state)},
          {"workers", node.workers},
          {"silent_seconds", ToSeconds(node.silent)},
          {"last_rounds", node.last_rounds},
          {"waited_seconds", ToSeconds(node.waited)},
          {"reconnections", node.reconnections}};
}

Json ToJson(const std::optional<WaitingReport>& waiting) {
  if (!waiting) return nullptr;
  const RoundId& id = waiting->round;
  return {{"bucket", id.bucket.index}, {"part", id.bucket.part},
          {"chunk", id.chunk},         {"round", id.round},
          {"nodes", waiting->missing}, {"seconds", ToSeconds(waiting->open)}};
}

Json ToJson(const std::optional<PlacementReport>& placement) {
  if (!placement) return nullptr;
  Json shares = Json::array();
  for (const uint32_t share : placement->shares) {
    shares.push_back(static_cast<double>(share) / kShareTotal);
  }
  return {{"shares", std::move(shares)},
          {"seconds_per_byte", placement->forecast.seconds_per_byte},
          {"ring_seconds_per_byte", placement->forecast.ring_seconds_per_byte},
          {"text", placement->text}};
}

Json ToJson(const FlightReport& flight) {
  const auto seconds = [](const std::optional<Duration>& ago) {
    return ago ? Json(ToSeconds(*ago)) : Json();
  };
  Json came = Json::array();
  for (const FlightReport::Arrival& arrival : flight.came) {
    came.push_back({{"rank", arrival.rank}, {"seconds_ago", ToSeconds(arrival.ago)}});
  }
  return {{"name", flight.name},
          {"what", flight.what},
          {"came", std::move(came)},
          {"sent_seconds_ago", seconds(flight.sent)},
          {"done_seconds_ago", seconds(flight.done)}};
}

Json Formats(const JobReport& job) {
  Json formats = Json::array();
  for (const FormatReport& format : job.formats) {
    formats.push_back({{"format", Name(format.wire)},
                       {"factors", format.factors},
                       {"received", ToJson(format.received)}});
  }
  return formats;
}

Json ToJson(const JobReport& job) {
  Json nodes = Json::array();
  for (size_t i = 0; i < job.nodes.size(); ++i) nodes.push_back(ToJson(job.nodes[i], i));
  return {{"name", job.name},
          {"identity", job.identity},
          {"state", Name(job.state)},
          {"failure", job.failure},
          {"age_seconds", ToSeconds(job.age)},
          {"codec", job.codec},
          {"formats", Formats(job)},
          {"workers", job.world_size},
          {"shard", job.shard},
          {"shards", job.num_shards},
          {"chunk_bytes", job.chunk_bytes},
          {"window_chunks", job.window_chunks},
          {"link_bytes_per_second", job.link.bytes_per_second},
          {"link_round_trip_seconds", ToSeconds(job.link.round_trip)},
          {"placement", ToJson(job.placement)},
          {"round_timeout_seconds", ToSeconds(job.round_timeout)},
          {"contributions", job.contributions},
          {"repeated_contributions", job.repeated_contributions},
          {"rounds", job.rounds_completed},
          {"rounds_lost", job.rounds_lost},
          {"open_rounds", job.open_rounds},
          {"nonfinite_elements", job.nonfinite_elems},
          {"held_bytes", job.held_bytes},
          {"residual_bytes", job.residual_bytes},
          {"memory_reserved_bytes", job.memory_reserved_bytes},
          {"wait_seconds", ToSeconds(job.wait_time)},
          {"fold_seconds", ToSeconds(job.fold_time)},
          {"update_seconds", ToSeconds(job.update_time)},
          {"received", ToJson(job.received)},
          {"sent", ToJson(job.sent)},
          {"waiting", ToJson(job.waiting)},
          {"nodes", std::move(nodes)}};
}

// Returns the fields that every answer begins with.
Json Head(StartTime started) {
  return {{"version", THALWEG_VERSION},
          {"wire_version", kWireVersion},
          {"unix_seconds", ToSeconds(std::chrono::system_clock::now().time_since_epoch())},
          {"started_unix_seconds", started}};
}

Json Head(const ShardReport& report, StartTime started) {
  Json head = Head(started);
  head["uptime_seconds"] = ToSeconds(report.uptime);
  return head;
}

Json Faults(const ShardReport& report) {
  Json faults = Json::array();
  for (const FaultReport& fault : report.faults) {
    faults.push_back({{"seconds_ago", ToSeconds(fault.ago)},
                      {"job", fault.job},
                      {"kind", fault.refused ? "refused" : "failed"},
                      {"reason", absl::StatusCodeToString(fault.code)},
                      {"message", fault.message},
                      {"rounds_lost", fault.rounds_lost}});
  }
  return faults;
}

Json Outcomes(const ShardReport& report) {
  Json reasons = Json::array();
  for (const ReasonReport& reason : report.reasons) {
    reasons.push_back({{"reason", absl::StatusCodeToString(reason.code)},
                       {"jobs_failed", reason.jobs_failed},
                       {"nodes_refused", reason.nodes_refused},
                       {"rounds_lost", reason.rounds_lost}});
  }
  return reasons;
}

}  // namespace

std::string ShardJson(const ShardReport& report, StartTime started) {
  Json json = Head(report, started);
  json.update({{"weight", report.weight},
               {"draining", report.draining},
               {"jobs", report.jobs.size()},
               {"contributions", report.contributions},
               {"repeated_contributions", report.repeated_contributions},
               {"rounds", report.rounds_completed},
               {"nonfinite_elements", report.nonfinite_elems},
               {"held_bytes", report.held_bytes},
               {"residual_bytes", report.residual_bytes},
               {"memory_budget_bytes", report.memory_budget_bytes},
               {"memory_reserved_bytes", report.memory_reserved_bytes},
               {"fold_seconds", ToSeconds(report.fold_time)},
               {"received", ToJson(report.received)},
               {"sent", ToJson(report.sent)},
               {"reasons", Outcomes(report)},
               {"faults", Faults(report)}});
  return Dump(json);
}

std::string JobsJson(const ShardReport& report, StartTime started) {
  Json json = Head(report, started);
  json["jobs"] = Json::array();
  for (const JobReport& job : report.jobs) {
    Json one = ToJson(job);
    if (job.codec.size() > kMaxListedCodec) {
      one["codec"] = absl::StrCat(job.codec.substr(0, kMaxListedCodec), "…");
    }
    json["jobs"].push_back(std::move(one));
  }
  return Dump(json);
}

std::string JobJson(const ShardReport& report, StartTime started, const std::string& name) {
  const JobReport* oldest = nullptr;
  for (const JobReport& job : report.jobs) {
    if (job.name == name && (oldest == nullptr || job.age > oldest->age)) oldest = &job;
  }
  if (oldest == nullptr) return "";
  Json json = Head(report, started);
  json["job"] = ToJson(*oldest);
  return Dump(json);
}

std::string CollectivesJson(const std::vector<JobFlights>& jobs, StartTime started) {
  Json json = Head(started);
  json["jobs"] = Json::array();
  for (const JobFlights& job : jobs) {
    Json flights = Json::array();
    for (const FlightReport& flight : job.flights) flights.push_back(ToJson(flight));
    json["jobs"].push_back({{"name", job.job}, {"node", job.node}, {"collectives", flights}});
  }
  return Dump(json);
}

std::string ErrorJson(const std::string& error) { return Dump({{"error", error}}); }

}  // namespace thalweg
