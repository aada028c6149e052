// This file holds the parts of Job in which its nodes agree.
#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "server/aggregator/job.h"

namespace thalweg {

void Job::WhenComplete(TimePoint deadline, Done done) {
  {
    MutexLock lock(mutex_);
    waiting_.push_back({deadline, std::move(done)});
  }
  AnswerWaiting(Now());
}

void Job::AnswerWaiting(TimePoint now) {
  std::vector<Waiting> answered;
  absl::StatusOr<Terms> answer;
  {
    MutexLock lock(mutex_);
    const bool is_late = std::any_of(waiting_.begin(), waiting_.end(),
                                     [now](const Waiting& w) { return w.deadline <= now; });
    if (is_late && failure_.ok() && !members_.IsComplete()) {
      FailLocked(absl::DeadlineExceededError(
          absl::StrCat(members_.Missing(), " did not join aggregator shard ", spec_.shard)));
    }
    if (!failure_.ok()) {
      answer = failure_;
    } else if (members_.IsComplete()) {
      answer = plan_.TermsOf(rounds_.epoch());
    } else {
      return;
    }
    answered.swap(waiting_);
  }
  for (const Waiting& waiting : answered) waiting.done(answer);
}

void Job::FailUnlessBegun(const absl::Status& reason) {
  {
    MutexLock lock(mutex_);
    if (members_.IsComplete()) return;
    FailLocked(reason);
  }
  AnswerWaiting(Now());
}

absl::Status Job::BeginLocked(TimePoint now) {
  members_.Begin(now);
  plan_.Choose();
  if (snapshots_ != nullptr && spec_.shard == 0) KeepTermsLocked();
  THALWEG_ASSIGN_OR_RETURN(const size_t resumed, rounds_.Begin(plan_.flow()));
  if (spec_.resume) {
    metrics_.resumed_jobs.Add(1);
    spdlog::info(
        "job '{}': its nodes resume it after this shard or a node has been restarted, with {} "
        "chunks; the results of {} are passed on from nodes that have them",
        spec_.job, resumed, rounds_.num_missing());
  }
  return memory_.Reserve();
}

}  // namespace thalweg
