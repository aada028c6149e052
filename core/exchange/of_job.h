// Errors name the job that they are about.
#pragma once

#include <string>

#include "absl/status/status.h"

namespace thalweg {

// Prefixes the status with "job 'name': ", unless it has the prefix. Errors pass through several
// layers on their way to the workers, each of which may be the first to know the job.
bool IsOfJob(const std::string& job, const absl::Status& status);
absl::Status OfJob(const std::string& job, const absl::Status& status);

}  // namespace thalweg
