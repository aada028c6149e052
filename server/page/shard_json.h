// This header formats what a process reports as JSON, as docs/api.md describes.
#pragma once

#include <string>
#include <vector>

#include "core/exchange/flight_report.h"
#include "core/exchange/shard_report.h"

namespace thalweg {

// StartTime says when the process began, in seconds since 1970. Two answers with the same StartTime
// come from one process, whose counters have only grown in between.
using StartTime = double;

// Returns the body of GET /api/v1/shard. Bytes that are not UTF-8 are replaced.
std::string ShardJson(const ShardReport& report, StartTime started);
// Returns the body of GET /api/v1/jobs.
std::string JobsJson(const ShardReport& report, StartTime started);
// Returns the body of GET /api/v1/jobs/NAME; empty when there is no such job. Of several jobs with
// the name it describes the one that began first.
std::string JobJson(const ShardReport& report, StartTime started, const std::string& name);
// Returns the body of GET /api/v1/collectives.
std::string CollectivesJson(const std::vector<JobFlights>& jobs, StartTime started);
// Returns {"error": …}.
std::string ErrorJson(const std::string& error);

}  // namespace thalweg
