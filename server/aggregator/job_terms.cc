// This file holds the parts of Job in which its nodes agree.
#include <algorithm>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/status_macros.h"
#include "server/aggregator/job.h"

namespace thalweg {
namespace {

// Returns the nodes that host the job's shards, e.g. "'0, 1, none'".
std::string HostsText(const JoinRequest& request) {
  const auto append = [](std::string* text, uint32_t host) {
    if (host == kNoHost) {
      absl::StrAppend(text, "none");
    } else {
      absl::StrAppend(text, host);
    }
  };
  return absl::StrCat("'", absl::StrJoin(HostsOf(request), ", ", append), "'");
}

}  // namespace

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
    if (is_late && failure_.ok() && !IsCompleteLocked()) {
      FailLocked(absl::DeadlineExceededError(
          absl::StrCat(MissingMembersLocked(), " did not join aggregator shard ", spec_.shard)));
    }
    if (!failure_.ok()) {
      answer = failure_;
    } else if (IsCompleteLocked()) {
      answer = Terms{.epoch = kEpoch,
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

absl::Status Job::CheckWorkersLocked(const JoinRequest& request) const {
  if (joined_ + 1 < spec_.num_nodes) return absl::OkStatus();
  const uint32_t workers =
      std::accumulate(members_.begin(), members_.end(), request.workers,
                      [](uint32_t sum, const Member& m) { return sum + m.workers; });
  if (workers == spec_.world_size) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "its nodes have ", workers, " workers together, but the world size is ", spec_.world_size));
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
  // The leases begin when the job does: until then the nodes waited here and could send nothing.
  for (Member& member : members_) member.last_heard = now;
  // The first shard chooses for all; the nodes tell the others.
  if (spec_.shard == 0) plan_ = PlanShares(rates_.Resolve());
  const std::vector<uint32_t> equal(spec_.num_shards, 1);
  flow_ = PlanFlow(slowest_, spec_.shard == 0 ? plan_.shares : equal, spec_.codec.fallback.wire);
  if (spec_.chunk_bytes != 0) flow_.chunk_bytes = spec_.chunk_bytes;
  if (spec_.window_chunks != 0) flow_.window_chunks = spec_.window_chunks;
  flow_.window_chunks = std::min(flow_.window_chunks, max_window_chunks_);
  layouts_ = LayoutRegistry(flow_.chunk_bytes, spec_.num_shards);
  engine_ = RoundEngine({kEpoch, spec_.num_nodes, flow_.window_chunks, spec_.round_timeout});
  THALWEG_RETURN_IF_ERROR(ResumeLocked());
  return ReserveLocked();
}

absl::Status Job::CheckSameJob(const JoinRequest& r) const {
  const auto differs = [&](const char* what, const auto& theirs, const auto& ours) {
    return absl::InvalidArgumentError(absl::StrCat("node ", r.node, " (", r.node_name, ") says ",
                                                   what, " is ", theirs, ", node ", spec_.node,
                                                   " (", spec_.node_name, ") says ", ours));
  };
  if (r.resume.has_value() != resumes_) {
    const auto when = [](bool resumes) {
      return resumes ? "before this aggregator was restarted" : "now";
    };
    return differs("the job's beginning", when(r.resume.has_value()), when(resumes_));
  }
  if (r.num_nodes != spec_.num_nodes) {
    return differs("the number of nodes", r.num_nodes, spec_.num_nodes);
  }
  if (r.world_size != spec_.world_size) {
    return differs("the world size", r.world_size, spec_.world_size);
  }
  if (r.num_shards != spec_.num_shards) {
    return differs("the number of aggregators", r.num_shards, spec_.num_shards);
  }
  if (r.shard != spec_.shard) {
    return differs("this aggregator's place in the list of aggregators", r.shard, spec_.shard);
  }
  if (HostsOf(r) != HostsOf(spec_)) {
    return differs("the list of nodes that host the shards", HostsText(r), HostsText(spec_));
  }
  if (r.chunk_bytes != spec_.chunk_bytes) {
    return differs("the chunk size in bytes", r.chunk_bytes, spec_.chunk_bytes);
  }
  if (r.window_chunks != spec_.window_chunks) {
    return differs("the window in chunks", r.window_chunks, spec_.window_chunks);
  }
  if (r.costs.size() != spec_.costs.size()) {
    return differs("the number of codecs with a cost", r.costs.size(), spec_.costs.size());
  }
  if (r.codec != spec_.codec) {
    return differs("the codec", r.codec.ToString(), spec_.codec.ToString());
  }
  return absl::OkStatus();
}

}  // namespace thalweg
