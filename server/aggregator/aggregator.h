// Aggregator is an aggregator shard: it sums the contributions of each job's nodes and gives every
// node the same result.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "core/base/mutex.h"
#include "core/base/protocol.h"
#include "core/base/thread.h"
#include "core/base/trace.h"
#include "core/exchange/served_shard.h"
#include "core/exchange/shard_report.h"
#include "server/aggregator/admission.h"
#include "server/aggregator/ended_jobs.h"
#include "server/aggregator/fault_log.h"
#include "server/aggregator/job.h"
#include "server/aggregator/job_places.h"
#include "server/aggregator/memory_budget.h"
#include "server/base/log_limit.h"
#include "server/base/metrics.h"

namespace thalweg {

// A JobId names a job on a shard: jobs of one name with different identities are different jobs.
// An Aggregator is thread-safe. It knows nothing about models and keeps nothing of a job whose last
// node has left.
class Aggregator : public ServedShard {
 public:
  struct Options {
    uint32_t max_window_chunks = kMaxWindowChunks;
    uint32_t weight = 0;           // see Terms
    TraceWriter* trace = nullptr;  // nothing is traced when null; must outlive the aggregator
    bool hosted_only = false;      // nodes may join only jobs that Host has invited
    // All jobs together may reserve this many bytes.
    uint64_t memory_bytes = std::numeric_limits<uint64_t>::max();
    // Decides which nodes of other machines may join which jobs; null: all may join all.
    PolicySource policy = nullptr;
    SnapshotWriter* snapshots = nullptr;  // none are kept when null; must outlive the aggregator
  };

  // A Hosting invites nodes to a job until it is destroyed. A job that has begun by then goes on;
  // one whose nodes still wait for each other fails.
  class Hosting {
   public:
    ~Hosting();
    Hosting(const Hosting&) = delete;
    Hosting& operator=(const Hosting&) = delete;

   private:
    friend class Aggregator;
    using Invitation = std::multiset<JobId>::iterator;
    Hosting(Aggregator& shard, Invitation invitation) : shard_(shard), invitation_(invitation) {}

    Aggregator& shard_;
    const Invitation invitation_;
  };

  Aggregator(const Options& options, MetricRegistry& registry);
  ~Aggregator() override;  // calls Stop

  // Returns the default, because no network lies between the shard and its direct caller.
  absl::StatusOr<LinkSpeed> MeasureLink(uint32_t, TimePoint, const std::stop_token&) override {
    return LinkSpeed{};
  }
  GiveUp BeginJoin(const JoinRequest& request, std::shared_ptr<ServedNode> node, TimePoint deadline,
                   Joined joined) override;
  bool HasPolicy() const override { return options_.policy != nullptr; }

  // With hosted_only: lets nodes join this job, until the result and all others for the same job
  // are destroyed. The aggregator must outlive the result.
  std::unique_ptr<Hosting> Host(const std::string& job, const std::string& identity);

  // Fails the jobs in which a round or a lease has timed out. The aggregator calls it often by
  // itself. This process has run since `awake_since`.
  void Tick(TimePoint now, TimePoint awake_since = TimePoint::min());
  // Fails every job with `why`, present and future ones. Idempotent.
  void Stop(const absl::Status& why);
  // Returns the state of the shard and its jobs. Cheap enough to call every second.
  ShardReport Report(TimePoint now);
  // Returns the number of jobs that have members.
  size_t num_jobs() {
    MutexLock lock(mutex_);
    return jobs_.size();
  }
  // Takes no new jobs from now on and waits for those that are under way; returns false at
  // `deadline`. Nodes that wait for others, or have joined and say nothing, hold nobody up.
  bool Drain(TimePoint deadline);

 private:
  class SeatedMember;
  struct Seat {
    std::shared_ptr<Job> job;  // shared with jobs_, because calls may outlive the job's removal
    JobId job_id;
    uint32_t node = 0;
  };

  // Gives the node a seat in its job, which begins to gather with its first node. A node that has
  // been restarted, and resumes a job in which it has a seat, lets the job gather again.
  absl::StatusOr<Seat> Admit(const JoinRequest& request, std::shared_ptr<ServedNode> node);
  // Does so for a request that is in order, in a job that is open to it.
  absl::StatusOr<Seat> SeatLocked(const JoinRequest& request, std::shared_ptr<ServedNode> node,
                                  std::shared_ptr<TenantAccount> account)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Removes the job of that name, if it has to gather again for the request. Returns what tells its
  // nodes, to be called without the lock; null: nobody has to be told.
  absl::StatusOr<std::function<void()>> ForgetForLocked(const JobId& id, const JoinRequest& request)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns why no node may join the job now, which may exist or not.
  absl::Status CheckOpenLocked(const JobId& id, const JoinRequest& request) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns why a node of tenant `account` may not join the job, which may exist or not.
  absl::Status CheckTenantLocked(const JobId& id, const TenantAccount& account)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Ends what Admit has begun, as Member::Leave says. Idempotent.
  void Vacate(const Seat& seat, const absl::Status& reason);
  void ForgetIfEmptyLocked(const JobId& id, const std::shared_ptr<Job>& job)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void TickLoop();

  const Options options_;
  const TimePoint began_ = Now();
  ShardMetrics metrics_;
  MemoryBudget memory_;
  Admission admission_;
  FaultLog faults_;
  LogLimit open_jobs_log_{"about jobs without a secret"};

  Mutex mutex_;
  CondVar changed_;
  absl::Status stopped_ ABSL_GUARDED_BY(mutex_);
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  std::multiset<JobId> invited_ ABSL_GUARDED_BY(mutex_);  // one for each Hosting
  std::map<JobId, std::shared_ptr<Job>> jobs_ ABSL_GUARDED_BY(mutex_);
  EndedJobs ended_ ABSL_GUARDED_BY(mutex_);
  JobPlaces places_ ABSL_GUARDED_BY(mutex_);
  Thread ticker_;  // declared last, because it uses everything above
};

}  // namespace thalweg
