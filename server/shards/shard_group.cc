#include "server/shards/shard_group.h"

#include <algorithm>
#include <deque>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/status_macros.h"
#include "core/base/thread.h"
#include "server/plan/flow_plan.h"
#include "server/plan/link_rates.h"

namespace thalweg {

namespace {

// For jobs too short for many heartbeats, this many comparisons of clocks are made right after
// joining; the best one counts.
constexpr int kFirstComparisons = 5;
// Returns what the shards sum, from their weights and what the first one has chosen.
absl::StatusOr<SharePlan> Settle(std::vector<uint32_t> weights, const Terms& first) {
  const auto is_set = [](uint32_t weight) { return weight > 0; };
  if (std::any_of(weights.begin(), weights.end(), is_set)) {
    for (uint32_t& weight : weights) weight = std::max(weight, 1u);
    return SharePlan{std::move(weights), {}};
  }
  if (first.shares.size() != weights.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("aggregator shard 0 answered with the shares of ", first.shares.size(),
                     " shards, expected ", weights.size()));
  }
  return SharePlan{first.shares, first.forecast};
}

// Returns the shares; a shard that has none, and may still sum what its node alone wants, gets what
// its window is worth.
std::vector<double> PositiveSharesOf(const std::vector<uint32_t>& shares,
                                     const std::vector<uint32_t>& windows) {
  const double all = std::accumulate(shares.begin(), shares.end(), 0.0);
  const double slots = std::accumulate(windows.begin(), windows.end(), 0.0);
  std::vector<double> positive;
  for (size_t k = 0; k < shares.size(); ++k) {
    positive.push_back(shares[k] > 0 ? shares[k] : all * windows[k] / slots);
  }
  return positive;
}

absl::Status NotJoined(uint32_t shard) {
  return absl::FailedPreconditionError(
      absl::StrCat("the job has not joined aggregator shard ", shard));
}

}  // namespace

ShardGroup::ShardGroup(std::vector<Shard*> shards, MetricRegistry& metrics, TraceWriter* trace)
    : shards_(std::move(shards)), trace_(trace), states_(shards_.size()) {
  for (size_t k = 0; k < states_.size(); ++k) {
    states_[k].wait_seconds =
        &metrics.GetCounter("thalweg_sidecar_shard_wait_seconds_total",
                            "Time for which chunks waited because a shard owed a window of results",
                            {{"shard", absl::StrCat(k)}});
    states_[k].share = &metrics.GetGauge(
        "thalweg_sidecar_shard_share",
        "Part of the gradients that a shard sums, in the job that has joined last",
        {{"shard", absl::StrCat(k)}});
  }
}

absl::Status ShardGroup::MeasureLinks(JoinRequest* request, TimePoint deadline) {
  if (!request->hosts.empty() && request->hosts.size() != size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the job names the hosts of ", request->hosts.size(), " shards, there are ", size()));
  }
  LinkSpeed& slowest = request->link;
  slowest = {};
  request->shard_rates.assign(size(), 0);
  for (const uint32_t k : ShardsToMeasure(request->node, request->num_nodes, HostsOf(*request))) {
    THALWEG_ASSIGN_OR_RETURN(
        const LinkSpeed link,
        shards_[k]->MeasureLink(request->num_nodes, deadline, stop_.get_token()));
    request->shard_rates[k] = link.bytes_per_second;
    if (link.bytes_per_second <= 0) continue;  // there is no network in between
    slowest.round_trip = std::max(slowest.round_trip, link.round_trip);
    if (slowest.bytes_per_second <= 0 || link.bytes_per_second < slowest.bytes_per_second) {
      slowest.bytes_per_second = link.bytes_per_second;
    }
  }
  return absl::OkStatus();
}

absl::Status ShardGroup::Join(
    JoinRequest request, const std::function<std::shared_ptr<MemberEvents>(uint32_t)>& events_of,
    TimePoint deadline) {
  request.num_shards = size();
  request.stop = stop_.get_token();
  THALWEG_RETURN_IF_ERROR(MeasureLinks(&request, deadline));
  std::vector<uint32_t> weights;
  // Every node joins in this order, so a node that waits at shard k has been admitted by all
  // previous shards.
  for (uint32_t k = 0; k < size(); ++k) {
    request.shard = k;
    THALWEG_ASSIGN_OR_RETURN(std::unique_ptr<Member> member,
                             shards_[k]->Join(request, events_of(k), deadline));
    const Terms& terms = member->terms();
    // The first shard chooses the chunk size and the window, which the others are told, and settles
    // the costs and the shares.
    if (k == 0 && terms.costs.size() != request.costs.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("aggregator shard 0 answered with the costs of ", terms.costs.size(),
                       " codecs, expected ", request.costs.size()));
    }
    if (terms.losses != request.losses) {
      return absl::FailedPreconditionError(absl::StrCat(
          "aggregator shard ", k, " cannot go on without a node: install this node's release"));
    }
    request.chunk_bytes = terms.chunk_bytes;
    request.window_chunks = terms.window_chunks;
    request.costs.clear();
    request.shard_rates.clear();
    weights.push_back(terms.weight);
    for (int i = 0; trace_ != nullptr && i < kFirstComparisons; ++i) {
      CallHeartbeat(k, *member).status().IgnoreError();  // the exchange will report what is wrong
    }
    THALWEG_RETURN_IF_ERROR(SetMember(k, std::move(member)));
  }
  const Terms first = agreed();
  THALWEG_ASSIGN_OR_RETURN(SharePlan plan, Settle(std::move(weights), first));
  std::vector<Placement> placements(kMaxParts, Placement(plan.shares));
  Open(std::move(plan), first.window_chunks, std::move(placements));
  return absl::OkStatus();
}

absl::Status ShardGroup::SetMember(uint32_t k, std::unique_ptr<Member> member) {
  MutexLock lock(mutex_);
  if (left_) return LeftLocked();
  states_[k].member = std::move(member);
  states_[k].last_heard = Now();
  return absl::OkStatus();
}

void ShardGroup::Open(SharePlan plan, uint32_t window_chunks, std::vector<Placement> placements) {
  MutexLock lock(mutex_);
  const double total = std::accumulate(plan.shares.begin(), plan.shares.end(), 0.0);
  for (uint32_t k = 0; k < size(); ++k) states_[k].share->Show(plan.shares[k] / total, this);
  placements_ = std::move(placements);
  plan_ = std::move(plan);
  AddLanesLocked(0, window_chunks);
}

absl::StatusOr<Member*> ShardGroup::MemberOf(uint32_t shard) {
  MutexLock lock(mutex_);
  if (left_) return LeftLocked();
  if (states_[shard].member == nullptr) return NotJoined(shard);
  return states_[shard].member.get();
}

absl::Status ShardGroup::LeftLocked() const {
  return left_because_.ok() ? absl::CancelledError("the job has ended") : left_because_;
}

absl::StatusOr<Placement::Placed> ShardGroup::RegisterBucket(BucketAnnouncement bucket,
                                                             const ChunkPlan& plan,
                                                             TimePoint deadline) {
  Placement::Placed placed;
  {
    MutexLock lock(mutex_);
    if (placements_.empty())
      return absl::FailedPreconditionError("the job has not joined its shards");
    Placement& placement = placements_[bucket.id.part];
    // A bucket that an earlier process has announced stays where it is.
    const Placement::Placed* const known = placement.Find(bucket.id);
    placed = known != nullptr ? *known : placement.Place(bucket.id, plan, bucket.wire);
  }
  bucket.placement = Placement::Fingerprint(placed.shards);
  THALWEG_RETURN_IF_ERROR(
      CallAll([&](Member& member) { return member.Register(bucket, deadline); }));
  return placed;
}

absl::Status ShardGroup::MakeGroup(const Group& group, TimePoint deadline) {
  THALWEG_RETURN_IF_ERROR(
      CallAll([&](Member& member) { return member.MakeGroup(group, deadline); }));
  MutexLock lock(mutex_);
  AddLanesLocked(group.id, std::max(group.window_chunks, kLeastWindow));
  return absl::OkStatus();
}

absl::Status ShardGroup::CallAll(const std::function<absl::Status(Member&)>& call) {
  std::vector<absl::Status> answers(size());
  {
    std::vector<Thread> threads;  // one for each shard but the first
    for (uint32_t k = size(); k-- > 0;) {
      THALWEG_ASSIGN_OR_RETURN(Member* const member, MemberOf(k));
      const auto ask = [&answers, &call, member, k] { answers[k] = call(*member); };
      if (k > 0) {
        threads.emplace_back("shard-call", ask);
      } else {
        ask();
      }
    }
  }
  for (const absl::Status& answer : answers) THALWEG_RETURN_IF_ERROR(answer);
  return absl::OkStatus();
}

void ShardGroup::AddLanesLocked(uint32_t group, uint32_t window_chunks) {
  const std::vector<uint32_t> windows = WindowsOf(plan_.shares, window_chunks);
  const std::vector<double> shares = PositiveSharesOf(plan_.shares, windows);
  std::vector<Counter*> wait_seconds;
  for (const State& state : states_) wait_seconds.push_back(state.wait_seconds);
  lanes_.try_emplace(group, std::vector(kMaxParts, SendLane(windows, shares, wait_seconds)));
}

SendLane* ShardGroup::FindLaneLocked(uint32_t group, uint32_t part) {
  const auto found = lanes_.find(group);
  return found == lanes_.end() ? nullptr : &found->second[part];
}

absl::Status ShardGroup::Contribute(uint32_t k, Contribution contribution) {
  const uint32_t part = contribution.id.bucket.part;
  const uint32_t group = contribution.group;
  {
    MutexLock lock(mutex_);
    if (left_) return LeftLocked();
    State& state = states_[k];
    if (state.member == nullptr) return NotJoined(k);
    contribution.epoch = state.member->terms().epoch;
    SendLane* const lane = FindLaneLocked(group, part);
    if (lane == nullptr) {
      return absl::FailedPreconditionError(absl::StrCat("group ", group, " has not been declared"));
    }
    if (!lane->Push(k, std::move(contribution))) return absl::OkStatus();
  }
  return Send(k, group, part);
}

absl::Status ShardGroup::Post(uint32_t k, Contribution letter) {
  THALWEG_ASSIGN_OR_RETURN(Member* const member, MemberOf(k));
  letter.epoch = member->terms().epoch;
  return member->Contribute(std::move(letter));
}

absl::Status ShardGroup::OnAnswered(uint32_t k, uint32_t group, uint32_t part) {
  {
    MutexLock lock(mutex_);
    SendLane* const lane = FindLaneLocked(group, part);
    if (left_ || lane == nullptr || !lane->NoteAnswered(k)) return absl::OkStatus();
  }
  return Send(k, group, part);
}

absl::Status ShardGroup::Send(uint32_t k, uint32_t group, uint32_t part) {
  while (true) {
    std::optional<Contribution> next;
    Member* member = nullptr;
    {
      MutexLock lock(mutex_);
      next = FindLaneLocked(group, part)->Next(k, Now());
      member = states_[k].member.get();
    }
    if (!next) return absl::OkStatus();
    // A shard in this process may have the round's result, and call OnAnswered, before it returns.
    THALWEG_RETURN_IF_ERROR(member->Contribute(*std::move(next)));
  }
}

absl::StatusOr<std::vector<float>> ShardGroup::ReadResidual(uint32_t k, BucketId bucket,
                                                            uint32_t chunk, TimePoint deadline) {
  THALWEG_ASSIGN_OR_RETURN(Member* const member, MemberOf(k));
  return member->ReadResidual(bucket, chunk, deadline);
}

absl::Status ShardGroup::WriteResidual(uint32_t k, BucketId bucket, uint32_t chunk,
                                       std::span<const float> residual, TimePoint deadline) {
  THALWEG_ASSIGN_OR_RETURN(Member* const member, MemberOf(k));
  return member->WriteResidual(bucket, chunk, residual, deadline);
}

absl::Status ShardGroup::SetSettings(uint64_t number, const UpdateStep& step, TimePoint deadline) {
  return CallAll([&](Member& member) { return member.SetSettings(number, step, deadline); });
}

absl::StatusOr<WeightsSlice> ShardGroup::ReadWeights(uint32_t k, BucketId bucket, uint32_t chunk,
                                                     uint32_t slice, TimePoint deadline) {
  THALWEG_ASSIGN_OR_RETURN(Member* const member, MemberOf(k));
  return member->ReadWeights(bucket, chunk, slice, deadline);
}

absl::Status ShardGroup::WriteWeights(uint32_t k, BucketId bucket, uint32_t chunk, uint32_t slice,
                                      WeightsSlice weights, TimePoint deadline) {
  THALWEG_ASSIGN_OR_RETURN(Member* const member, MemberOf(k));
  return member->WriteWeights(bucket, chunk, slice, std::move(weights), deadline);
}

absl::StatusOr<SnapshotReport> ShardGroup::Snapshots(const SnapshotCall& call, TimePoint deadline) {
  Mutex mutex;
  std::vector<SnapshotReport> reports;
  THALWEG_RETURN_IF_ERROR(CallAll([&](Member& member) {
    THALWEG_ASSIGN_OR_RETURN(SnapshotReport report, member.Snapshots(call, deadline));
    MutexLock lock(mutex);
    reports.push_back(std::move(report));
    return absl::OkStatus();
  }));
  SnapshotReport all = reports.front();
  for (const SnapshotReport& report : reports) {
    all.is_writing = all.is_writing || report.is_writing;
    std::erase_if(all.complete, [&](const SnapshotId& id) {
      return !std::binary_search(report.complete.begin(), report.complete.end(), id);
    });
  }
  return all;
}

std::string ShardGroup::PendingShards() { return SilentPendingShards(TimePoint::max()); }

std::string ShardGroup::SilentPendingShards(TimePoint since) {
  MutexLock lock(mutex_);
  std::vector<std::string> names;
  for (uint32_t k = 0; k < size(); ++k) {
    if (states_[k].last_heard >= since) continue;
    uint32_t owed = 0;
    for (const auto& [group, lanes] : lanes_) {
      for (const SendLane& lane : lanes) owed += lane.owed(k);
    }
    if (owed > 0) names.push_back(absl::StrCat("aggregator shard ", k, " (", owed, " results)"));
  }
  return absl::StrJoin(names, ", ");
}

absl::StatusOr<std::vector<LostNode>> ShardGroup::Heartbeat(uint32_t k) {
  const auto member = MemberOf(k);
  if (!member.ok()) return std::vector<LostNode>();  // not joined yet, or over
  auto lost = CallHeartbeat(k, **member);
  if (lost.ok() || absl::IsNotFound(lost.status())) return lost;
  return std::vector<LostNode>();
}

absl::StatusOr<std::vector<LostNode>> ShardGroup::CallHeartbeat(uint32_t k, Member& member) {
  const TimePoint asked = Now();
  THALWEG_ASSIGN_OR_RETURN(Pulse pulse, member.Heartbeat(asked + heartbeat_interval()));
  // A shard of an earlier release has no clock.
  if (trace_ != nullptr && !pulse.clock.clock.empty()) {
    trace_->AddOffset(OffsetOf(pulse.clock, asked, Now()));
  }
  MutexLock lock(mutex_);
  states_[k].last_heard = Now();
  return std::move(pulse.lost);
}

void ShardGroup::Leave(const absl::Status& reason) {
  std::vector<Member*> members;
  std::vector<std::deque<Contribution>> unsent;  // released without the lock
  {
    MutexLock lock(mutex_);
    if (left_) return;
    left_ = true;
    left_because_ = reason;
    for (uint32_t k = 0; k < size(); ++k) {
      if (states_[k].member != nullptr) members.push_back(states_[k].member.get());
      states_[k].share->Clear(this);
    }
    for (auto& [group, lanes] : lanes_) {
      for (SendLane& lane : lanes) unsent.push_back(lane.Close());
    }
  }
  stop_.request_stop();
  std::vector<Thread> threads;  // one for each shard but the first, as in CallAll
  for (size_t k = 1; k < members.size(); ++k) {
    threads.emplace_back("shard-call", [&, k] { members[k]->Leave(reason); });
  }
  if (!members.empty()) members.front()->Leave(reason);
}

Terms ShardGroup::agreed() {
  MutexLock lock(mutex_);
  // The first shard chooses, and the others are told.
  return states_.empty() || states_[0].member == nullptr ? Terms{} : states_[0].member->terms();
}

std::vector<uint64_t> ShardGroup::epochs() {
  MutexLock lock(mutex_);
  std::vector<uint64_t> epochs;
  for (const State& state : states_) {
    epochs.push_back(state.member == nullptr ? 0 : state.member->terms().epoch);
  }
  return epochs;
}

SharePlan ShardGroup::plan() {
  MutexLock lock(mutex_);
  return plan_;
}

}  // namespace thalweg
