// Job is one training job on one shard: its members and their open rounds.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/mutex.h"
#include "core/base/snapshots.h"
#include "core/base/trace.h"
#include "core/exchange/join.h"
#include "core/exchange/rounds.h"
#include "core/exchange/served_shard.h"
#include "server/aggregator/delivery.h"
#include "server/aggregator/fault_log.h"
#include "server/aggregator/job_memory.h"
#include "server/aggregator/job_tally.h"
#include "server/aggregator/letters.h"
#include "server/aggregator/shard_metrics.h"
#include "server/aggregator/snapshot_writer.h"
#include "server/plan/job_plan.h"
#include "server/round/job_rounds.h"
#include "server/round/membership.h"

namespace thalweg {

// A Job is thread-safe. It needs all its nodes, unless they have said with how many it goes on. Any
// failure fails the whole job, and every node is told the reason. Sinks are called with no lock
// held.
class Job : private Delivery::Recipients {
 public:
  // `memory`, `metrics`, `faults`, `trace` and `snapshots` must outlive the job. Without `trace`
  // nothing is traced, and without `snapshots` none are kept.
  Job(const JoinRequest& first, uint32_t max_window_chunks, MemoryBudget& memory,
      ShardMetrics& metrics, FaultLog& faults, TraceWriter* trace = nullptr,
      SnapshotWriter* snapshots = nullptr);

  // Makes `request.node` a member. A request that contradicts the job is refused. While the job is
  // still gathering its nodes, such a request also fails the job, which can then never become
  // complete. The last node's request fails it, too, when the shard lacks the memory for it: the
  // nodes learn that from WhenComplete.
  //
  // The first member that has an account makes the job its tenant's, and the tenant's quota counts
  // for it; the others must have the same, or none.
  //
  // `node` is told the results from then on, and a failure once the job is complete.
  absl::Status AddMember(const JoinRequest& request, std::shared_ptr<ServedNode> node,
                         TimePoint now, std::shared_ptr<TenantAccount> account = nullptr);
  // Returns the account of the job's tenant; null: it has none.
  std::shared_ptr<const TenantAccount> account();
  // Calls `done` once, with no lock held: with the terms when all nodes have joined, but without
  // what differs by node and the shard's weight; with the failure when the job fails before, which
  // it also does at `deadline`, with DeadlineExceeded that names the missing nodes. The call comes
  // from here, AnswerWaiting or Tick. (job_terms.cc)
  using Done = std::function<void(const absl::StatusOr<Terms>&)>;
  void WhenComplete(TimePoint deadline, Done done);
  void AnswerWaiting(TimePoint now);

  // Says whether the node has been restarted: it resumes the job, in which it has a seat. Then all
  // nodes have to join again. Only nodes of a job with a secret are believed that. InvalidArgument,
  // FailedPrecondition: the job cannot go on with it. (job_resume.cc, as is the next)
  absl::StatusOr<bool> GathersAgainFor(const JoinRequest& request);
  // Ends the job as a restart of the shard would: its nodes are told NotFound, by calling what this
  // returns with no lock held. What it has reserved is free when this returns.
  std::function<void()> Forget(const JoinRequest& request);

  absl::Status RegisterBucket(uint32_t node, const BucketAnnouncement& bucket);
  absl::Status MakeGroup(uint32_t node, const Group& group);
  absl::Status Contribute(uint32_t node, Contribution contribution, TimePoint now);
  // Returns the nodes without which the job goes on.
  absl::StatusOr<std::vector<LostNode>> Heartbeat(uint32_t node, TimePoint now);

  // These resume a job that has begun before the shard was restarted (job_resume.cc).
  // Returns the results that `node` must Supply; called once the job is complete.
  std::vector<BucketRounds> WantedFrom(uint32_t node);
  absl::Status Supply(uint32_t node, const RoundResult& result, TimePoint now);

  // Both implement the methods of Member with the same names. (job_residuals.cc)
  absl::StatusOr<std::vector<float>> ReadResidual(uint32_t node, BucketId bucket, uint32_t chunk);
  absl::Status WriteResidual(uint32_t node, BucketId bucket, uint32_t chunk,
                             std::span<const float> values);

  // These are for buckets with an update (job_updates.cc). Settings are numbered from 1, and every
  // node gives those that its contributions will name; InvalidArgument, and the job fails, when
  // nodes differ. Node k that updates alone may number its own from k + 1 << kSeriesBit on. Reading
  // and writing follow the rules of residuals.
  absl::Status SetSettings(uint32_t node, uint64_t number, const UpdateStep& step);
  absl::StatusOr<WeightsSlice> ReadWeights(uint32_t node, BucketId bucket, uint32_t chunk,
                                           uint32_t slice);
  absl::Status WriteWeights(uint32_t node, BucketId bucket, uint32_t chunk, uint32_t slice,
                            WeightsSlice weights);

  // Takes, restores and lists snapshots of the weights. DataLoss: the shard has been restarted and
  // has none to take. (job_snapshots.cc)
  absl::StatusOr<SnapshotReport> Snapshots(uint32_t node, const SnapshotCall& call);

  void RemoveMember(uint32_t node, const absl::Status& reason);
  // Returns true when no member has joined or all have left: the job can then be removed.
  bool IsEmpty();
  // Returns why a job that had begun has failed for good; OK: it has not, or all nodes join again.
  absl::Status WhyOver();
  // Returns whether the job has begun and not failed, and its nodes use it.
  bool IsUnderWay(TimePoint now);
  const JoinRequest& first() const { return spec_; }  // the request, without its rounds

  // Returns the job's state. (job_report.cc)
  JobReport Report(TimePoint now);

  // Fails the job when a round, a lease or the wait for its nodes has timed out. This process has
  // run since `awake_since`.
  void Tick(TimePoint now, TimePoint awake_since = TimePoint::min());
  void Fail(const absl::Status& reason);
  // Fails it if nodes are still missing, and answers those that wait for them. (job_terms.cc)
  void FailUnlessBegun(const absl::Status& reason);

 private:
  // A Waiting is a call of WhenComplete.
  struct Waiting {
    TimePoint deadline;
    Done done;
  };

  // Makes a node a member that may be one; the last one begins the job.
  void SeatLocked(const JoinRequest& request, std::shared_ptr<ServedNode> node, TimePoint now)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Gives a contribution to the rounds. (job_contribute.cc, as is Contribute)
  absl::StatusOr<JobRounds::Held> HoldLocked(uint32_t node, Contribution contribution,
                                             TimePoint now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Checks that the results that are kept for the node on a stream have memory.
  absl::Status CheckKeptLocked(uint32_t node, const ServedNode::Kept& kept)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns the chunk's state, making it at first use. On error the job must fail; Fail says so.
  // (job_updates.cc)
  absl::StatusOr<std::shared_ptr<ChunkState>> StateLocked(BucketId bucket, uint32_t chunk,
                                                          uint64_t elems)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns how many weights the chunk has, or why the node may not use that slice of them.
  absl::StatusOr<uint64_t> WeightElemsLocked(uint32_t node, BucketId bucket, uint32_t chunk,
                                             uint32_t slice) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // These are in job_snapshots.cc.
  absl::Status CheckSnapshots() const;
  // Reserves memory for copies of weights, once; from then on the job may have snapshots.
  absl::Status HaveSnapshotsLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status TakeSnapshot(const SnapshotCall& call);
  absl::Status RestoreSnapshot(const SnapshotId& id);
  // Returns the header of a snapshot of this job's weights.
  SnapshotHeader HeaderLocked(const SnapshotId& id) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns the states that the snapshot's chunks go to, or why it is not of this job's weights.
  absl::StatusOr<std::vector<std::shared_ptr<ChunkState>>> PlacesLocked(const Snapshot& snapshot)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Keeps chunks and shares as they were in the snapshots of this job, if there are any.
  void KeepTermsLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Passes a letter on to its node. (job_contribute.cc)
  absl::Status PassOn(uint32_t node, Contribution letter, TimePoint now);
  Audience AudienceOf(const CompleteRound& round) override;
  std::shared_ptr<ServedNode> Find(uint32_t node) override;
  // Returns the sinks of those of the nodes that are present.
  std::vector<std::shared_ptr<ServedNode>> SinksLocked(const std::vector<uint32_t>& nodes) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ReportRoundsLocked(TimePoint now, JobReport* report) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Records the failure and returns the sinks to Tell after the lock is released; returns none when
  // the job has already failed.
  std::vector<std::shared_ptr<ServedNode>> FailLocked(const absl::Status& reason)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static void Tell(const std::vector<std::shared_ptr<ServedNode>>& sinks, const absl::Status& why);
  // Lets go of rounds, layouts and states, of which nothing will come any more. Returns the sinks
  // that are to be told.
  std::vector<std::shared_ptr<ServedNode>> ReleaseLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Fixes the terms when all nodes have joined. (job_terms.cc)
  absl::Status BeginLocked(TimePoint now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status WhyOverLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Both say whether the node may take part; with the second it has been heard.
  absl::Status CheckActiveLocked(uint32_t node) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status HearLocked(uint32_t node, TimePoint now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // A Loss is what follows from going on without a node, also if only for now: rounds that are
  // complete without it, and who is told, which is the node itself, if it is lost and still
  // listens.
  struct Loss {
    std::vector<Completed> completed;
    std::shared_ptr<ServedNode> sink;
    absl::Status why;
  };
  // These are in job_losses.cc. The first goes on without the node, whose loss `why` explains, if
  // the job can; it returns an error if the job must fail then. The second tells and sends.
  absl::StatusOr<std::optional<Loss>> LoseLocked(uint32_t node, const absl::Status& why,
                                                 TimePoint now)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Conclude(const Loss& loss);
  // Returns why the job fails now; OK if it does not. Adds what silent nodes are lost.
  absl::Status FindFailureLocked(TimePoint now, TimePoint awake_since, std::vector<Loss>* losses)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Counts the job's end if its last node is gone and it has not failed; returns whether its
  // snapshots are not needed any more.
  bool NoteEndLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns how many elements the chunk's residual has, or why the node may not use it.
  absl::StatusOr<uint64_t> ResidualElemsLocked(uint32_t node, BucketId bucket, uint32_t chunk) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Updates the gauges; gives the reservation back when the job is over.
  void UpdateMemoryLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // The request of the node that came first, without its rounds. If it has `resume`, the job has
  // begun before the shard was restarted.
  const JoinRequest spec_;
  ShardMetrics& metrics_;
  FaultLog& faults_;
  const TimePoint began_ = Now();
  Delivery delivery_;
  SnapshotWriter* const snapshots_;         // null: none are kept
  const std::shared_ptr<const void> held_;  // keeps its snapshots

  Mutex taking_ ABSL_ACQUIRED_BEFORE(mutex_);  // while weights are marked for a snapshot
  Mutex mutex_;
  Members members_ ABSL_GUARDED_BY(mutex_);
  // By node, as this shard speaks to it; null: it has not joined, or has left.
  std::vector<std::shared_ptr<ServedNode>> sinks_ ABSL_GUARDED_BY(mutex_);
  std::vector<Waiting> waiting_ ABSL_GUARDED_BY(mutex_);
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  JobPlan plan_ ABSL_GUARDED_BY(mutex_);
  JobRounds rounds_ ABSL_GUARDED_BY(mutex_);
  Letters letters_ ABSL_GUARDED_BY(mutex_);
  JobMemory memory_ ABSL_GUARDED_BY(mutex_);
  JobTally tally_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace thalweg
