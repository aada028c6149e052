// A shard's report as JSON, in the form that docs/api.md describes.
#pragma once

#include <string>

#include "core/base/shard_report.h"

namespace thalweg {

// When the process began, in seconds since 1970: two answers with the same are of one process, and
// its counters have only grown in between.
using StartTime = double;

// GET /api/v1/shard. Text that is not UTF-8 has its wrong bytes replaced.
std::string ShardJson(const ShardReport& report, StartTime started);
// GET /api/v1/jobs.
std::string JobsJson(const ShardReport& report, StartTime started);
// GET /api/v1/jobs/NAME; empty when there is no such job.
std::string JobJson(const ShardReport& report, StartTime started, const std::string& name);
// {"error": …}
std::string ErrorJson(const std::string& error);

}  // namespace thalweg
