#include "core/base/exchange.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace thalweg {

std::string ToString(const RoundId& id) {
  if (!IsOneShot(id)) {
    return absl::StrCat("bucket ", ToString(id.bucket), " round ", id.round, " chunk ", id.chunk);
  }
  return absl::StrCat("one-shot round ", id.round, " of group ", id.bucket.generation, " chunk ",
                      id.chunk);
}

bool IsOfJob(const std::string& job, const absl::Status& status) {
  return absl::StartsWith(status.message(), absl::StrCat("job '", job, "'"));
}

absl::Status OfJob(const std::string& job, const absl::Status& status) {
  if (status.ok() || IsOfJob(job, status)) return status;
  return absl::Status(status.code(), absl::StrCat("job '", job, "': ", status.message()));
}

}  // namespace thalweg
