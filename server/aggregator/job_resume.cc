// This file holds the parts of Job that resume it after its shard has been restarted.
#include <spdlog/spdlog.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/protocol.h"
#include "core/base/status_macros.h"
#include "core/exchange/of_job.h"
#include "server/aggregator/job.h"
#include "server/round/same_job.h"

namespace thalweg {

absl::StatusOr<bool> Job::GathersAgainFor(const JoinRequest& request) {
  MutexLock lock(mutex_);
  const bool is_believed = request.resume && !spec_.identity.empty();
  if (!is_believed || !failure_.ok() || members_.CheckSeat(request).ok()) return false;
  JoinRequest first = spec_;
  first.resume = request.resume;
  if (members_.IsComplete()) {
    first.chunk_bytes = plan_.flow().chunk_bytes;
    first.window_chunks = plan_.flow().window_chunks;
  }
  THALWEG_RETURN_IF_ERROR(OfJob(spec_.job, CheckSameJob(first, request)));
  if (members_.epoch() > 1) {
    return absl::FailedPreconditionError(
        absl::StrCat("job '", spec_.job, "': node ", request.node, " (", request.node_name,
                     ") has been restarted, and cannot take its seat again: the job has gone on "
                     "without a node"));
  }
  if (!rounds_.layouts().HasUpdated()) return true;
  return absl::FailedPreconditionError(absl::StrCat(
      "job '", spec_.job, "': node ", request.node, " (", request.node_name,
      ") has been restarted, and cannot take its seat again: this shard keeps weights of the job"));
}

std::function<void()> Job::Forget(const JoinRequest& request) {
  MutexLock lock(mutex_);
  failure_ = OfJob(spec_.job,
                   absl::NotFoundError(absl::StrCat("node ", request.node, " (", request.node_name,
                                                    ") has been restarted, and all nodes join "
                                                    "this shard again")));
  auto sinks = ReleaseLocked();
  for (uint32_t node = 0; node < sinks_.size(); ++node) {  // their callers may be dead
    if (!members_.Leave(node)) continue;
    sinks_[node] = nullptr;
    metrics_.nodes.Add(-1);
  }
  return [this, why = failure_, sinks = std::move(sinks)] {
    Tell(sinks, why);
    AnswerWaiting(Now());
  };
}

std::vector<BucketRounds> Job::WantedFrom(uint32_t node) {
  MutexLock lock(mutex_);
  return rounds_.WantedFrom(node);
}

absl::Status Job::Supply(uint32_t node, const RoundResult& result, TimePoint now) {
  absl::Status status;
  std::vector<std::shared_ptr<ServedNode>> sinks;
  {
    MutexLock lock(mutex_);
    THALWEG_RETURN_IF_ERROR(HearLocked(node, now));
    const auto asked = rounds_.Supply(node, result, plan_.MostBytesOfResult());
    status = asked.status();
    if (asked.ok()) sinks = SinksLocked(*asked);
  }
  if (!status.ok()) {
    Fail(status);
    return OfJob(spec_.job, status);
  }
  metrics_.supplied_results.Add(1);
  for (const auto& sink : sinks) sink->OnResult(result);
  return absl::OkStatus();
}

}  // namespace thalweg
