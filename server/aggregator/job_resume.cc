// This file holds the parts of Job that resume it after its shard has been restarted.
#include <spdlog/spdlog.h>

#include <algorithm>
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
  if (!layouts_.HasUpdated()) return true;
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
  for (uint32_t node = 0; node < peers_.size(); ++node) {  // their callers may be dead
    if (!members_.Leave(node)) continue;
    peers_[node].sink = nullptr;
    metrics_.nodes.Add(-1);
  }
  return [this, why = failure_, sinks = std::move(sinks)] {
    Tell(sinks, why);
    AnswerWaiting(Now());
  };
}

absl::Status Job::ResumeLocked() {
  if (!spec_.resume) return absl::OkStatus();
  const absl::StatusOr<std::vector<RoundId>> complete = resumption_.Settle(spec_.num_nodes);
  if (absl::IsDataLoss(complete.status())) {
    return absl::DataLossError(
        absl::StrCat(complete.status().message(), "; ", LostWeights().message()));
  }
  THALWEG_RETURN_IF_ERROR(complete.status());
  for (const RoundId& id : *complete) {
    engine_.AllowPart(id.bucket.part);
    engine_.SetCompleted(id);
  }
  metrics_.resumed_jobs.Add(1);
  spdlog::info(
      "job '{}': its nodes resume it after this shard or a node has been restarted, with {} "
      "chunks; the "
      "results of {} are passed on from nodes that have them",
      spec_.job, complete->size(), resumption_.num_missing());
  return absl::OkStatus();
}

std::vector<BucketRounds> Job::WantedFrom(uint32_t node) {
  MutexLock lock(mutex_);
  return resumption_.WantedFrom(node);
}

absl::Status Job::Supply(uint32_t node, const RoundResult& result, TimePoint now) {
  absl::StatusOr<std::vector<std::shared_ptr<ServedNode>>> sinks;
  {
    MutexLock lock(mutex_);
    THALWEG_RETURN_IF_ERROR(HearLocked(node, now));
    sinks = TakeSuppliedLocked(node, result);
  }
  if (!sinks.ok()) {
    Fail(sinks.status());
    return OfJob(spec_.job, sinks.status());
  }
  for (const auto& sink : *sinks) sink->OnResult(result);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::shared_ptr<ServedNode>>> Job::TakeSuppliedLocked(
    uint32_t node, const RoundResult& result) {
  const size_t bytes = result.payload.SizeBytes();
  const uint64_t most = plan_.MostBytesOfResult();
  // The epoch stays that of the joining when nodes are lost. In a pull no worker contributes, and
  // in a group only some do.
  if (result.epoch != engine_.epoch() || result.workers > spec_.world_size || bytes > most ||
      !IsPayloadSize(result.wire, result.elems, bytes)) {
    return absl::InvalidArgumentError(absl::StrCat(
        members_.Name(node), " supplies a result of epoch ", result.epoch, " and ", result.workers,
        " workers with ", result.elems, " elements in ", bytes, " bytes, expected epoch ",
        engine_.epoch(), ", at most ", spec_.world_size, " workers, and the bytes of ",
        result.elems, " elements in ", Name(result.wire), ", at most ", most));
  }
  THALWEG_ASSIGN_OR_RETURN(const std::vector<uint32_t> asked, resumption_.Supply(node, result));
  metrics_.supplied_results.Add(1);
  return SinksLocked(asked);
}

void Job::NoteLostResidualLocked(const RoundId& id) {
  if (!spec_.resume || id.round == 1) return;
  metrics_.lost_residuals.Add(1);
  if (std::exchange(has_lost_residuals_, true)) return;
  spdlog::warn(
      "job '{}': what the encoding of results had left out before this shard or a node was "
      "restarted is lost: the residuals of int8 and onebit begin at zero again",
      spec_.job);
}

}  // namespace thalweg
