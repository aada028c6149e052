#include "server/aggregator/ended_jobs.h"

#include <algorithm>

namespace thalweg {

void EndedJobs::Note(const JobId& id, const absl::Status& why, TimePoint now) {
  if (why.ok()) return;
  ends_[id] = {absl::AbortedError(why.message()), now};
  std::erase_if(ends_, [now](const auto& entry) { return now - entry.second.at > kKept; });
  if (ends_.size() <= kMost) return;
  ends_.erase(std::min_element(ends_.begin(), ends_.end(), [](const auto& a, const auto& b) {
    return a.second.at < b.second.at;
  }));
}

absl::Status EndedJobs::Check(const JobId& id, TimePoint now) const {
  const auto found = ends_.find(id);
  if (found == ends_.end() || now - found->second.at > kKept) return absl::OkStatus();
  return found->second.why;
}

}  // namespace thalweg
