// This file holds the part of CollectiveRunner that says what is late.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/sidecar/collective/collective_runner.h"

namespace thalweg {
namespace {

// A shard's own report of a late round takes less.
constexpr Duration kGrace = std::chrono::seconds(2);

}  // namespace

absl::Status CollectiveRunner::CheckLate(TimePoint now, TimePoint awake_since) const {
  MutexLock lock(mutex_);
  for (const auto& [number, group] : groups_) {
    for (const auto& [sequence, collective] : group.collectives) {
      const Duration limit = FromMillis(collective->spec().timeout_ms);
      const TimePoint since = std::max(collective->since(), awake_since);
      if (!collective->IsGathered() && now - since > limit) {
        return absl::DeadlineExceededError(absl::StrCat(
            collective->Name(), ": rank ", absl::StrJoin(collective->Missing(), ", "),
            " of the group did not come within the timeout of ", ToSeconds(limit), " s"));
      }
      // Shards fail a round in time themselves, if they are there.
      const TimePoint last = std::max(since, context_.progress.last());
      if (collective->IsGathered() && collective->remaining() > 0 && now - last > limit + kGrace) {
        return absl::DeadlineExceededError(absl::StrCat(
            collective->Name(), ": ", collective->remaining(), " of ", collective->num_chunks(),
            " chunks did not come back within the timeout of ", ToSeconds(limit),
            " s; missing are ", context_.shards.PendingShards()));
      }
    }
  }
  return absl::OkStatus();
}

std::vector<std::string> CollectiveRunner::UnderWay() const {
  MutexLock lock(mutex_);
  std::vector<std::string> names;
  for (const auto& [number, group] : groups_) {
    for (const auto& [sequence, collective] : group.collectives) {
      if (sequence <= group.settled || group.done.contains(sequence)) continue;
      names.push_back(collective->Name());
      break;
    }
  }
  return names;
}

std::vector<std::string> CollectiveRunner::LatestFlights(TimePoint now) const {
  MutexLock lock(mutex_);
  return record_.Fail(now);
}

}  // namespace thalweg
