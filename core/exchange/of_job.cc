#include "core/exchange/of_job.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace thalweg {

bool IsOfJob(const std::string& job, const absl::Status& status) {
  return absl::StartsWith(status.message(), absl::StrCat("job '", job, "'"));
}

absl::Status OfJob(const std::string& job, const absl::Status& status) {
  if (status.ok() || IsOfJob(job, status)) return status;
  return absl::Status(status.code(), absl::StrCat("job '", job, "': ", status.message()));
}

}  // namespace thalweg
