// This file holds the parts of Job in which its nodes agree.
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
      answer = Terms{.epoch = members_.epoch(),
                     .chunk_bytes = flow_.chunk_bytes,
                     .window_chunks = flow_.window_chunks,
                     .link = slowest_,
                     .costs = costs_,
                     .shares = plan_.shares,
                     .forecast = plan_.forecast};
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

void Job::LearnLocked(const JoinRequest& request) {
  const LinkSpeed& link = request.link;
  const bool slower =
      slowest_.bytes_per_second <= 0 || link.bytes_per_second < slowest_.bytes_per_second;
  if (link.bytes_per_second > 0 && slower) slowest_ = link;
  for (size_t i = 0; i < costs_.size(); ++i) costs_[i] = Slower(costs_[i], request.costs[i]);
  rates_.Add(request.node, request.shard_rates);
}

absl::Status Job::BeginLocked(TimePoint now) {
  members_.Begin(now);
  // The first shard chooses for all; the nodes tell the others.
  if (spec_.shard == 0) plan_ = PlanShares(rates_.Resolve());
  const std::vector<uint32_t> equal(spec_.num_shards, 1);
  flow_ = PlanFlow(slowest_, spec_.shard == 0 ? plan_.shares : equal, spec_.codec.fallback.wire);
  if (spec_.chunk_bytes != 0) flow_.chunk_bytes = spec_.chunk_bytes;
  if (spec_.window_chunks != 0) flow_.window_chunks = spec_.window_chunks;
  flow_.window_chunks = std::min(flow_.window_chunks, max_window_chunks_);
  if (snapshots_ != nullptr && spec_.shard == 0) KeepTermsLocked();
  layouts_ = LayoutRegistry(flow_.chunk_bytes, spec_.num_shards, spec_.num_nodes);
  engine_ = RoundEngine({members_.epoch(), spec_.num_nodes, flow_.window_chunks,
                         spec_.round_timeout, members_.Workers()});
  THALWEG_RETURN_IF_ERROR(ResumeLocked());
  return ReserveLocked();
}

}  // namespace thalweg
