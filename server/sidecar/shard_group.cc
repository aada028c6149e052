#include "server/sidecar/shard_group.h"

#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/status_macros.h"

namespace thalweg {

namespace {

// For jobs too short for many heartbeats, this many comparisons of clocks are made right after
// joining; the best one counts.
constexpr int kFirstComparisons = 5;

}  // namespace

ShardGroup::ShardGroup(std::vector<Shard*> shards, MetricRegistry& metrics, TraceWriter* trace)
    : shards_(std::move(shards)), trace_(trace), states_(shards_.size()) {
  for (size_t k = 0; k < states_.size(); ++k) {
    states_[k].wait_seconds = &metrics.GetCounter(
        "thalweg_sidecar_shard_wait_seconds_total",
        "Time for which sending waited because a shard owed a window of results",
        {{"shard", absl::StrCat(k)}});
  }
}

absl::Status ShardGroup::Join(JoinRequest request,
                              const std::function<std::shared_ptr<NodeSink>(uint32_t)>& make_sink,
                              TimePoint deadline) {
  request.num_shards = size();
  // Each node measures with another shard, so that nodes do not disturb each other.
  THALWEG_ASSIGN_OR_RETURN(request.link, shards_[request.node % size()]->MeasureLink(deadline));
  std::vector<uint32_t> weights;
  // Every node joins in this order, so a node that waits at shard k has been admitted by all
  // previous shards.
  for (uint32_t k = 0; k < size(); ++k) {
    request.shard = k;
    THALWEG_ASSIGN_OR_RETURN(const Membership membership, shards_[k]->Join(request, deadline));
    // The first shard chooses the chunk size, which the others are told, and settles the costs.
    if (k == 0 && membership.costs.size() != request.costs.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("aggregator shard 0 answered with the costs of ", membership.costs.size(),
                       " codecs, expected ", request.costs.size()));
    }
    request.chunk_bytes = membership.chunk_bytes;
    request.costs.clear();
    weights.push_back(membership.weight);
    {
      MutexLock lock(mutex_);
      states_[k].membership = membership;
    }
    THALWEG_RETURN_IF_ERROR(shards_[k]->Attach(membership.token, request.identity, make_sink(k)));
    for (int i = 0; trace_ != nullptr && i < kFirstComparisons; ++i) {
      Heartbeat(k, membership.token).IgnoreError();  // the exchange will report what is wrong
    }
  }
  MutexLock lock(mutex_);
  placements_.assign(kMaxParts, Placement(weights));
  return absl::OkStatus();
}

absl::StatusOr<SessionToken> ShardGroup::Token(uint32_t shard) {
  MutexLock lock(mutex_);
  if (left_) return LeftLocked();
  if (!states_[shard].membership) return absl::FailedPreconditionError("shard not joined");
  return states_[shard].membership->token;
}

absl::Status ShardGroup::LeftLocked() const {
  return left_because_.ok() ? absl::CancelledError("the job has ended") : left_because_;
}

absl::StatusOr<std::vector<uint32_t>> ShardGroup::RegisterBucket(BucketAnnouncement bucket,
                                                                 const ChunkPlan& plan,
                                                                 TimePoint deadline) {
  std::vector<uint32_t> placed;
  {
    MutexLock lock(mutex_);
    if (placements_.empty()) return absl::FailedPreconditionError("shards not joined");
    placed = placements_[bucket.id.part].Place(bucket.id.index, plan, bucket.wire);
  }
  bucket.placement = Placement::Fingerprint(placed);
  for (uint32_t k = 0; k < size(); ++k) {
    THALWEG_ASSIGN_OR_RETURN(const SessionToken token, Token(k));
    THALWEG_RETURN_IF_ERROR(shards_[k]->RegisterBucket(token, bucket, deadline));
  }
  return placed;
}

absl::Status ShardGroup::Contribute(uint32_t k, Contribution contribution, TimePoint deadline) {
  SessionToken token = 0;
  {
    MutexLock lock(mutex_);
    if (left_) return LeftLocked();
    State& state = states_[k];
    if (!state.membership) return absl::FailedPreconditionError("shard not joined");
    uint32_t& outstanding = state.outstanding[contribution.id.bucket.part];
    const auto has_place = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return left_ || outstanding < state.membership->window_chunks;
    };
    if (!has_place()) {
      const TimePoint start = Now();
      changed_.WaitUntil(mutex_, deadline, has_place);
      state.wait_seconds->Add(ToSeconds(Now() - start));
    }
    if (left_) return LeftLocked();
    if (!has_place()) {
      return absl::DeadlineExceededError(
          absl::StrCat("aggregator shard ", k, " owes ", outstanding, " results"));
    }
    ++outstanding;
    token = state.membership->token;
    contribution.epoch = state.membership->epoch;
  }
  return shards_[k]->Contribute(token, std::move(contribution));
}

bool ShardGroup::HasPlace(uint32_t shard) {
  MutexLock lock(mutex_);
  const State& state = states_[shard];
  return state.membership && state.outstanding[0] < state.membership->window_chunks;
}

void ShardGroup::OnAnswered(uint32_t shard, uint32_t part) {
  MutexLock lock(mutex_);
  uint32_t& outstanding = states_[shard].outstanding[part];
  if (outstanding > 0) --outstanding;
  changed_.NotifyAll();
}

absl::StatusOr<std::vector<float>> ShardGroup::ReadResidual(uint32_t k, BucketId bucket,
                                                            uint32_t chunk, TimePoint deadline) {
  THALWEG_ASSIGN_OR_RETURN(const SessionToken token, Token(k));
  return shards_[k]->ReadResidual(token, bucket, chunk, deadline);
}

absl::Status ShardGroup::WriteResidual(uint32_t k, BucketId bucket, uint32_t chunk,
                                       std::span<const float> residual, TimePoint deadline) {
  THALWEG_ASSIGN_OR_RETURN(const SessionToken token, Token(k));
  return shards_[k]->WriteResidual(token, bucket, chunk, residual, deadline);
}

std::string ShardGroup::Debtors() {
  MutexLock lock(mutex_);
  std::vector<std::string> names;
  for (size_t k = 0; k < states_.size(); ++k) {
    const auto& by_part = states_[k].outstanding;
    const uint32_t owed = std::accumulate(by_part.begin(), by_part.end(), 0u);
    if (owed > 0) names.push_back(absl::StrCat("aggregator shard ", k, " (", owed, " results)"));
  }
  return absl::StrJoin(names, ", ");
}

absl::Status ShardGroup::Heartbeat() {
  for (uint32_t k = 0; k < size(); ++k) {
    auto token = Token(k);
    if (!token.ok()) return absl::OkStatus();  // not joined yet, or over
    const absl::Status status = Heartbeat(k, *token);
    // The exchange reports a slow or absent shard; a shard that does not know this node is a
    // failure.
    if (absl::IsNotFound(status)) return status;
  }
  return absl::OkStatus();
}

absl::Status ShardGroup::Heartbeat(uint32_t k, SessionToken token) {
  const TimePoint asked = Now();
  const auto reading = shards_[k]->Heartbeat(token, asked + kHeartbeatInterval);
  // A shard of an earlier release has no clock.
  if (trace_ != nullptr && reading.ok() && !reading->clock.empty()) {
    trace_->AddOffset(OffsetOf(*reading, asked, Now()));
  }
  return reading.status();
}

void ShardGroup::Leave(const absl::Status& reason) {
  std::vector<std::pair<Shard*, SessionToken>> memberships;
  {
    MutexLock lock(mutex_);
    if (left_) return;
    left_ = true;
    left_because_ = reason;
    for (uint32_t k = 0; k < size(); ++k) {
      if (states_[k].membership) memberships.emplace_back(shards_[k], states_[k].membership->token);
    }
    changed_.NotifyAll();
  }
  for (const auto& [shard, token] : memberships) shard->Leave(token, reason);
}

Membership ShardGroup::agreed() {
  MutexLock lock(mutex_);
  // The first shard chooses, and the others are told.
  return states_.empty() ? Membership{} : states_[0].membership.value_or(Membership{});
}

}  // namespace thalweg
