#include "server/sidecar/watchdog.h"

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"

namespace thalweg {
namespace {

Duration LookInterval(const LayeredTimeout& timeout) {
  return std::clamp<Duration>(timeout.worker / 50, std::chrono::milliseconds(2),
                              std::chrono::milliseconds(100));
}

}  // namespace

Watchdog::Watchdog(LayeredTimeout timeout, TimePoint start, const Context& context)
    : timeout_(timeout), start_(start), context_(context) {}

absl::Status Watchdog::Look(TimePoint now) const {
  const absl::Status late = CheckDeadlines(now);
  if (late.ok()) return late;
  return absl::Status(late.code(),
                      absl::StrCat(late.message(), " within ", ToSeconds(timeout_.sidecar()),
                                   " s; if that is a long but healthy pause, raise the timeout "
                                   "(THALWEG_TIMEOUT)"));
}

absl::Status Watchdog::CheckDeadlines(TimePoint now) const {
  THALWEG_RETURN_IF_ERROR(context_.roster.CheckGathered(now - start_, timeout_.sidecar()));
  for (const auto& bucket : context_.buckets.All()) {
    THALWEG_RETURN_IF_ERROR(CheckBucket(*bucket, now));
  }
  return absl::OkStatus();
}

absl::Status Watchdog::CheckBucket(NodeBucket& bucket, TimePoint now) const {
  const NodeBucket::Waiting waiting = bucket.waiting();
  const auto late = [&](uint64_t round, const std::string& what) {
    return absl::DeadlineExceededError(
        absl::StrCat("bucket ", ToString(bucket.id()), " round ", round, ": ", what));
  };
  if (!waiting.missing.empty() && now - waiting.first_submit > timeout_.sidecar()) {
    return late(waiting.round + 1, context_.roster.NamesOf(waiting.missing) + " did not submit");
  }
  // Measured from the last sign of life, so that a slow network is not taken for a dead one.
  const TimePoint since = std::max(context_.progress.last(), waiting.ready_since);
  if (!waiting.is_running || now - since <= timeout_.sidecar()) return absl::OkStatus();
  const std::vector<uint32_t> unfilled = bucket.UnfilledBy();
  if (!unfilled.empty()) {
    return late(waiting.round,
                context_.roster.NamesOf(unfilled) + " did not make all of the gradient");
  }
  const auto [missing_chunks, chunks] = bucket.Outstanding();
  return late(waiting.round,
              absl::StrCat(missing_chunks, " of ", chunks,
                           " chunks did not come back; missing are ", context_.shards.Debtors()));
}

void Watchdog::Watch(const std::function<void(const absl::Status&)>& on_late) const {
  const Duration interval = LookInterval(timeout_);
  while (!context_.outcome.WaitForEnd(Now() + interval)) {
    if (const absl::Status late = Look(Now()); !late.ok()) on_late(late);
  }
}

}  // namespace thalweg
