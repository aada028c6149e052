#include "server/aggregator/aggregator.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <atomic>
#include <span>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "server/base/awake_time.h"
#include "server/base/printable.h"

namespace thalweg {
namespace {

constexpr Duration kTickInterval = std::chrono::milliseconds(25);
constexpr Duration kIdleInterval = std::chrono::seconds(10);  // without jobs nothing is due
// After a longer time without a tick nodes may have spoken that were not heard. The shortest lease
// has room for it beside an interval of heartbeats.
constexpr Duration kLongestTick = std::chrono::seconds(1);
constexpr uint32_t kMaxNodes = 1024;  // of a job; ShardServer lets as many wait

absl::Status Invalid(const JoinRequest& r, const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat("job '", r.job, "', node ", r.node, ": ", what));
}

// Checks what the request says about the job's shards; the number of nodes is known to be valid.
absl::Status CheckShards(const JoinRequest& r) {
  if (r.num_shards > kMaxShards) {
    return Invalid(r, absl::StrCat("expected at most ", kMaxShards, " shards, got ", r.num_shards));
  }
  if (r.shard >= r.num_shards) {
    return Invalid(r, absl::StrCat("shard ", r.shard, " of ", r.num_shards));
  }
  if (!r.hosts.empty() && r.hosts.size() != r.num_shards) {
    return Invalid(
        r, absl::StrCat("names the hosts of ", r.hosts.size(), " shards of ", r.num_shards));
  }
  if (!r.shard_rates.empty() && r.shard_rates.size() != r.num_shards) {
    return Invalid(
        r, absl::StrCat("has rates of ", r.shard_rates.size(), " shards of ", r.num_shards));
  }
  std::vector<bool> is_host(r.num_nodes);
  for (const uint32_t host : r.hosts) {
    if (host == kNoHost) continue;
    if (host >= r.num_nodes) {
      return Invalid(r, absl::StrCat("a shard is said to be on node ", host, " of ", r.num_nodes));
    }
    if (is_host[host]) return Invalid(r, absl::StrCat("two shards are said to be on node ", host));
    is_host[host] = true;
  }
  return absl::OkStatus();
}

absl::Status CheckRequest(const JoinRequest& r) {
  const auto invalid = [&](const std::string& what) { return Invalid(r, what); };
  THALWEG_RETURN_IF_ERROR(CheckName("job name", r.job));
  if (!r.node_name.empty()) THALWEG_RETURN_IF_ERROR(CheckName("node name", r.node_name));
  if (r.num_nodes == 0 || r.num_nodes > kMaxNodes) {
    return invalid(absl::StrCat("expected 1 to ", kMaxNodes, " nodes, got ", r.num_nodes));
  }
  if (r.node >= r.num_nodes) return invalid(absl::StrCat("there are only ", r.num_nodes, " nodes"));
  if (r.workers == 0 || r.workers > r.world_size) {
    return invalid(absl::StrCat("stands for ", r.workers, " workers of ", r.world_size));
  }
  THALWEG_RETURN_IF_ERROR(CheckShards(r));
  if (r.chunk_bytes != 0 && (r.chunk_bytes < kMinChunkBytes || r.chunk_bytes > kMaxChunkBytes)) {
    return invalid(absl::StrCat("chunks must have ", kMinChunkBytes, " to ", kMaxChunkBytes,
                                " bytes, got ", r.chunk_bytes));
  }
  if (r.window_chunks > kMaxWindowChunks) {
    return invalid(absl::StrCat("the window must have at most ", kMaxWindowChunks, " chunks, got ",
                                r.window_chunks));
  }
  if (r.round_timeout <= Duration::zero()) return invalid("the round timeout must be positive");
  if (r.losses.min_nodes > r.num_nodes) {
    return invalid(absl::StrCat("the job is to go on with ", r.losses.min_nodes, " of ",
                                r.num_nodes, " nodes"));
  }
  if (r.losses.min_nodes > 0 &&
      std::any_of(r.hosts.begin(), r.hosts.end(), [](uint32_t host) { return host != kNoHost; })) {
    return invalid("nodes that host a shard cannot be lost");
  }
  return absl::OkStatus();
}

}  // namespace

// A SeatedMember is what a node does in its job here. The job's lock makes it thread-safe.
class Aggregator::SeatedMember : public Member {
 public:
  SeatedMember(Aggregator& shard, Seat seat, Terms terms)
      : shard_(shard), seat_(std::move(seat)), terms_(std::move(terms)) {}
  ~SeatedMember() override { Leave(absl::OkStatus()); }

  const Terms& terms() const override { return terms_; }
  absl::Status Register(const BucketAnnouncement& bucket, TimePoint /*deadline*/) override {
    return seat_.job->RegisterBucket(seat_.node, bucket);
  }
  absl::Status MakeGroup(const Group& group, TimePoint /*deadline*/) override {
    return seat_.job->MakeGroup(seat_.node, group);
  }
  absl::Status Contribute(Contribution contribution) override {
    return seat_.job->Contribute(seat_.node, std::move(contribution), Now());
  }
  absl::Status Supply(RoundResult result) override {
    return seat_.job->Supply(seat_.node, result, Now());
  }
  absl::StatusOr<std::vector<float>> ReadResidual(BucketId bucket, uint32_t chunk,
                                                  TimePoint /*deadline*/) override {
    return seat_.job->ReadResidual(seat_.node, bucket, chunk);
  }
  absl::Status WriteResidual(BucketId bucket, uint32_t chunk, std::span<const float> values,
                             TimePoint /*deadline*/) override {
    return seat_.job->WriteResidual(seat_.node, bucket, chunk, values);
  }
  absl::Status SetSettings(uint64_t number, const UpdateStep& step,
                           TimePoint /*deadline*/) override {
    return seat_.job->SetSettings(seat_.node, number, step);
  }
  absl::StatusOr<WeightsSlice> ReadWeights(BucketId bucket, uint32_t chunk, uint32_t slice,
                                           TimePoint /*deadline*/) override {
    return seat_.job->ReadWeights(seat_.node, bucket, chunk, slice);
  }
  absl::Status WriteWeights(BucketId bucket, uint32_t chunk, uint32_t slice, WeightsSlice weights,
                            TimePoint /*deadline*/) override {
    return seat_.job->WriteWeights(seat_.node, bucket, chunk, slice, std::move(weights));
  }
  absl::StatusOr<SnapshotReport> Snapshots(const SnapshotCall& call,
                                           TimePoint /*deadline*/) override {
    return seat_.job->Snapshots(seat_.node, call);
  }
  absl::StatusOr<Pulse> Heartbeat(TimePoint /*deadline*/) override {
    THALWEG_ASSIGN_OR_RETURN(auto lost, seat_.job->Heartbeat(seat_.node, Now()));
    return Pulse{ReadClock(), std::move(lost)};
  }
  void Leave(const absl::Status& reason) override {
    if (!has_left_.exchange(true)) shard_.Vacate(seat_, reason);
  }

 private:
  Aggregator& shard_;
  const Seat seat_;
  const Terms terms_;
  std::atomic<bool> has_left_{false};
};

Aggregator::Aggregator(const Options& options, MetricRegistry& registry)
    : options_(options),
      metrics_(registry),
      memory_(options.memory_bytes, metrics_.memory_reserved_bytes),
      admission_(options.policy, memory_, registry),
      ticker_("agg-tick", [this] { TickLoop(); }) {
  metrics_.memory_budget_bytes.Set(static_cast<double>(options.memory_bytes));
}

Aggregator::~Aggregator() { Stop(absl::CancelledError("the aggregator is shutting down")); }

Aggregator::GiveUp Aggregator::BeginJoin(const JoinRequest& request,
                                         std::shared_ptr<ServedNode> node, TimePoint deadline,
                                         Joined joined) {
  const absl::StatusOr<Seat> seat = Admit(request, std::move(node));
  if (!seat.ok()) {
    joined(seat.status());
    return nullptr;
  }
  seat->job->WhenComplete(
      deadline, [this, seat = *seat, resumed = request.resume.has_value(), losses = request.losses,
                 joined = std::move(joined)](absl::StatusOr<Terms> terms) {
        if (!terms.ok()) {
          Vacate(seat, absl::OkStatus());
          joined(terms.status());
          return;
        }
        terms->weight = options_.weight;
        terms->resumed = resumed;
        terms->losses = losses;
        terms->wanted = seat.job->WantedFrom(seat.node);
        joined(std::make_unique<SeatedMember>(*this, seat, *std::move(terms)));
      });
  return [this, seat = *seat](const absl::Status& reason) { Vacate(seat, reason); };
}

absl::StatusOr<Aggregator::Seat> Aggregator::Admit(const JoinRequest& request,
                                                   std::shared_ptr<ServedNode> node) {
  const auto refuse = [&](absl::Status why) {
    faults_.AddRefusal(request.job, why, Now());
    return why;
  };
  if (const absl::Status status = CheckRequest(request); !status.ok()) return refuse(status);
  const auto account = admission_.Find(request, Now());
  if (!account.ok()) return refuse(account.status());
  const JobId id{request.job, request.identity};
  absl::StatusOr<Seat> seat;
  std::function<void()> tell;
  {
    MutexLock lock(mutex_);
    if (!stopped_.ok()) return stopped_;
    absl::Status open = CheckOpenLocked(id, request);
    if (open.ok() && *account != nullptr) open = CheckTenantLocked(id, **account);
    if (!open.ok()) return refuse(open);
    auto forgotten = ForgetForLocked(id, request);
    if (!forgotten.ok()) return refuse(forgotten.status());
    tell = *std::move(forgotten);
    seat = SeatLocked(request, std::move(node), *account);
  }
  if (tell != nullptr) tell();
  return seat;
}

absl::StatusOr<std::function<void()>> Aggregator::ForgetForLocked(const JobId& id,
                                                                  const JoinRequest& request) {
  const auto found = jobs_.find(id);
  if (found == jobs_.end()) return nullptr;
  const std::shared_ptr<Job> job = found->second;
  THALWEG_ASSIGN_OR_RETURN(const bool gathers, job->GathersAgainFor(request));
  if (!gathers) return nullptr;
  places_.Return(job->first());
  jobs_.erase(found);
  spdlog::info("job '{}': node {} ({}) has been restarted: all nodes join this shard again",
               request.job, request.node, request.node_name);
  return [job, tell = job->Forget(request)] { tell(); };
}

absl::StatusOr<Aggregator::Seat> Aggregator::SeatLocked(const JoinRequest& request,
                                                        std::shared_ptr<ServedNode> node,
                                                        std::shared_ptr<TenantAccount> account) {
  const JobId id{request.job, request.identity};
  std::shared_ptr<Job>& slot = jobs_[id];
  if (slot == nullptr) {
    slot = std::make_shared<Job>(request, options_.max_window_chunks, memory_, metrics_, faults_,
                                 options_.trace, options_.snapshots);
    changed_.NotifyAll();
    places_.Take(request);
    if (!request.resume) ended_.Forget(id);
    metrics_.jobs.Set(static_cast<double>(jobs_.size()));
    // The first node of several waits for the others, and without a secret it cannot choose them.
    if (id.identity.empty() && request.num_nodes > 1 && open_jobs_log_.Admits(Now())) {
      spdlog::warn("job '{}' has no secret: whoever reaches this port can take part in it",
                   id.name);
    }
  }
  const std::shared_ptr<Job> job = slot;
  // The member is added under the lock of the look-up; otherwise the job could be removed as empty
  // in between.
  const absl::Status admitted = job->AddMember(request, std::move(node), Now(), std::move(account));
  if (!admitted.ok()) {
    ForgetIfEmptyLocked(id, job);
    return admitted;
  }
  return Seat{job, id, request.node};
}

absl::Status Aggregator::CheckOpenLocked(const JobId& id, const JoinRequest& request) const {
  if (options_.hosted_only && !invited_.contains(id)) {
    // Where the sidecar is new, its workers have not told it yet.
    const auto code =
        request.resume ? absl::StatusCode::kUnavailable : absl::StatusCode::kPermissionDenied;
    return absl::Status(code, absl::StrCat("this sidecar does not host a shard for job '", id.name,
                                           "', at least not for one with this secret"));
  }
  if (jobs_.contains(id)) return absl::OkStatus();
  if (request.resume) THALWEG_RETURN_IF_ERROR(ended_.Check(id, Now()));
  if (draining_) {
    return absl::UnavailableError("this aggregator is shutting down and takes no new jobs");
  }
  return places_.Check(request);
}

absl::Status Aggregator::CheckTenantLocked(const JobId& id, const TenantAccount& account) {
  const auto found = jobs_.find(id);
  const auto owner = found == jobs_.end() ? nullptr : found->second->account();
  const auto num_jobs = std::count_if(jobs_.begin(), jobs_.end(), [&account](const auto& entry) {
    return entry.second->account().get() == &account;
  });
  return admission_.Check(id.name, account, owner.get(), static_cast<size_t>(num_jobs), Now());
}

void Aggregator::Vacate(const Seat& seat, const absl::Status& reason) {
  seat.job->RemoveMember(seat.node, reason);
  seat.job->AnswerWaiting(Now());  // the last one takes the job along, before its next Tick
  MutexLock lock(mutex_);
  ForgetIfEmptyLocked(seat.job_id, seat.job);
}

void Aggregator::ForgetIfEmptyLocked(const JobId& id, const std::shared_ptr<Job>& job) {
  const auto found = jobs_.find(id);
  // A new job of the same name may have begun in the meantime.
  if (found == jobs_.end() || found->second != job || !job->IsEmpty()) return;
  places_.Return(job->first());
  ended_.Note(id, job->WhyOver(), Now());
  jobs_.erase(found);
  metrics_.jobs.Set(static_cast<double>(jobs_.size()));
  changed_.NotifyAll();
}

void Aggregator::TickLoop() {
  TimePoint next = Now();
  AwakeTime awake(next, kLongestTick);
  while (true) {
    {
      MutexLock lock(mutex_);
      changed_.WaitUntil(
          mutex_, Now() + kIdleInterval,
          [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !stopped_.ok() || !jobs_.empty(); });
      next = std::max(next + kTickInterval, Now());
      if (changed_.WaitUntil(
              mutex_, next, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !stopped_.ok(); }))
        return;
    }
    const TimePoint now = Now();
    Tick(now, awake.Look(now));
  }
}

void Aggregator::Tick(TimePoint now, TimePoint awake_since) {
  std::vector<std::shared_ptr<Job>> jobs;
  {
    MutexLock lock(mutex_);
    for (const auto& [id, job] : jobs_) jobs.push_back(job);
  }
  for (const auto& job : jobs) job->Tick(now, awake_since);
}

void Aggregator::Stop(const absl::Status& why) {
  std::vector<std::shared_ptr<Job>> jobs;
  {
    MutexLock lock(mutex_);
    if (!stopped_.ok()) return;
    stopped_ = why;
    for (const auto& [id, job] : jobs_) jobs.push_back(job);
    changed_.NotifyAll();
  }
  for (const auto& job : jobs) {
    job->Fail(why);
    job->AnswerWaiting(Now());
  }
  ticker_.Join();
}

ShardReport Aggregator::Report(TimePoint now) {
  ShardReport report;
  std::vector<std::shared_ptr<Job>> jobs;
  {
    MutexLock lock(mutex_);
    report.draining = draining_ || !stopped_.ok();
    for (const auto& [id, job] : jobs_) jobs.push_back(job);
  }
  for (const auto& job : jobs) {
    report.jobs.push_back(job->Report(now));
    if (options_.weight > 0) report.jobs.back().placement.reset();  // the nodes use the weights
  }
  report.uptime = now - began_;
  report.weight = options_.weight;
  report.memory_budget_bytes = memory_.limit();
  report.memory_reserved_bytes = memory_.reserved();
  metrics_.Report(&report);
  faults_.Report(now, &report);
  return report;
}

bool Aggregator::Drain(TimePoint deadline) {
  MutexLock lock(mutex_);
  draining_ = true;
  const auto is_drained = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return std::none_of(jobs_.begin(), jobs_.end(),
                        [](const auto& entry) { return entry.second->IsUnderWay(Now()); });
  };
  bool drained = false;
  do {  // a job that is silent ceases to be under way when nothing happens
    drained = changed_.WaitUntil(mutex_, std::min(deadline, Now() + kTickInterval), is_drained);
  } while (!drained && Now() < deadline);
  return drained;
}

}  // namespace thalweg
