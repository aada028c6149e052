// One training job on one shard: who its members are, and the rounds they have open.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/exchange.h"
#include "core/base/mutex.h"
#include "core/base/shard_report.h"
#include "core/base/trace.h"
#include "server/aggregator/fault_log.h"
#include "server/aggregator/job_tally.h"
#include "server/aggregator/shard_metrics.h"
#include "server/round/flow_plan.h"
#include "server/round/layout_registry.h"
#include "server/round/residual_store.h"
#include "server/round/round_engine.h"

namespace thalweg {

// Thread-safe. Membership is fixed: a job needs all its nodes, and any failure is a failure of the
// job, told to every node with the reason. Sinks are called with no lock held.
class Job {
 public:
  // What holds for all members alike.
  struct Terms {
    uint64_t epoch = 0;
    FlowPlan flow;
    LinkSpeed link;  // the slowest
    std::vector<CodecCost> costs;
  };

  // `metrics`, `faults` and `trace` must outlive it. Without `trace` nothing is traced.
  Job(const JoinRequest& first, uint32_t max_window_chunks, ShardMetrics& metrics, FaultLog& faults,
      TraceWriter* trace = nullptr);

  // Makes `request.node` a member. A request that contradicts the job is refused, and fails the job
  // when it is still gathering, because then it can never become complete.
  absl::Status AddMember(const JoinRequest& request, SessionToken token, TimePoint now);
  // Blocks until all nodes are there; else DeadlineExceeded naming the missing ones.
  absl::StatusOr<Terms> WaitComplete(TimePoint deadline);

  absl::Status Attach(uint32_t node, std::shared_ptr<NodeSink> sink);
  absl::Status RegisterBucket(uint32_t node, const BucketAnnouncement& bucket);
  absl::Status Contribute(uint32_t node, Contribution contribution, TimePoint now);
  absl::Status Heartbeat(uint32_t node, TimePoint now);

  // As Shard has them. (job_residuals.cc)
  absl::StatusOr<std::vector<float>> ReadResidual(uint32_t node, BucketId bucket, uint32_t chunk);
  absl::Status WriteResidual(uint32_t node, BucketId bucket, uint32_t chunk,
                             std::span<const float> values);

  void RemoveMember(uint32_t node, const absl::Status& reason);
  // No members, or none left: the job can be forgotten.
  bool IsEmpty();

  // How it is doing. (job_report.cc)
  JobReport Report(TimePoint now);

  // Fails the job when a round or a lease has run out.
  void Tick(TimePoint now);
  void Fail(const absl::Status& reason);

 private:
  struct Member {
    SessionToken token = 0;  // 0: not a member
    bool has_left = false;
    std::string name;  // "node 1 (host)"
    std::string host;
    uint32_t workers = 0;
    TimePoint last_heard;
    std::shared_ptr<NodeSink> sink;
    uint64_t last_rounds = 0;  // as NodeReport has these two
    Duration waited{};
  };

  // A complete round, and the residual of its chunk, if it has one.
  struct Completed {
    RoundEngine::CompleteRound round;
    std::shared_ptr<Residual> residual;
    double raw_bytes = 0;
    uint32_t last_node = 0;  // whose contribution made it complete
    TimePoint at;            // when that came
  };

  // Holds a contribution; the round, when that completes it.
  absl::StatusOr<std::optional<Completed>> HoldLocked(uint32_t node, Contribution contribution,
                                                      TimePoint now)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Counts what Add has said of a contribution. (job_report.cc)
  void CountLocked(uint32_t node, const LayoutRegistry::Weight& weight, uint64_t bytes,
                   const RoundEngine::Added& added) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Folds a complete round and hands the result to all members.
  absl::Status Deliver(const Completed& completed);
  // (job_report.cc)
  void TraceRound(const Completed& completed, const RoundResult& result, TimePoint fold_begin,
                  TimePoint fold_end) const;
  void ReportRoundsLocked(TimePoint now, JobReport* report) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Counts a result for `nodes` nodes. (job_report.cc)
  void CountDelivery(const RoundResult& result, double raw_bytes, size_t nodes, Duration fold_time);
  // Returns whom to Tell, once the lock is released; nobody when the job has failed before.
  std::vector<std::shared_ptr<NodeSink>> FailLocked(const absl::Status& reason)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static void Tell(const std::vector<std::shared_ptr<NodeSink>>& sinks, const absl::Status& why);
  absl::Status CheckSameJob(const JoinRequest& request) const;
  // All nodes are there: settles the terms.
  void BeginLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool IsCompleteLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::string MissingMembersLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::string NameLocked(uint32_t node) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::string NamesLocked(const std::vector<uint32_t>& nodes) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckActiveLocked(uint32_t node) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::optional<absl::Status> FindFailureLocked(TimePoint now) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // How many elements the chunk's residual has, or why the node may not use it.
  absl::StatusOr<uint64_t> ResidualElemsLocked(uint32_t node, BucketId bucket, uint32_t chunk) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void UpdateMemoryLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const JoinRequest spec_;  // of the node that came first
  const uint32_t max_window_chunks_;
  ShardMetrics& metrics_;
  FaultLog& faults_;
  const std::vector<Counter*> waited_for_;  // by node
  const TimePoint began_ = Now();
  DeliveryTally delivered_;
  const JobTrace trace_;

  Mutex mutex_;
  CondVar changed_;
  std::vector<Member> members_ ABSL_GUARDED_BY(mutex_);
  uint32_t joined_ ABSL_GUARDED_BY(mutex_) = 0;  // members that have ever joined
  uint32_t present_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  LinkSpeed slowest_ ABSL_GUARDED_BY(mutex_);             // of all links known
  std::vector<CodecCost> costs_ ABSL_GUARDED_BY(mutex_);  // the largest known
  FlowPlan flow_ ABSL_GUARDED_BY(mutex_);                 // once complete
  LayoutRegistry layouts_ ABSL_GUARDED_BY(mutex_);
  RoundEngine engine_ ABSL_GUARDED_BY(mutex_);
  ResidualStore residuals_ ABSL_GUARDED_BY(mutex_);
  JobTally tally_ ABSL_GUARDED_BY(mutex_);
  // What this job has added to the shard's gauges.
  double reported_held_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  double reported_limit_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  double reported_residual_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace thalweg
