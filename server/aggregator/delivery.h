// Delivery takes rounds that are complete to their nodes: it folds them, updates the weights that
// the shard keeps, sends, counts and traces.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/trace.h"
#include "core/exchange/join.h"
#include "core/exchange/rounds.h"
#include "core/exchange/served_shard.h"
#include "core/exchange/shard_report.h"
#include "server/aggregator/shard_metrics.h"
#include "server/round/completed.h"
#include "server/round/update.h"

namespace thalweg {

// A Delivery is of one job, and thread-safe. It calls its nodes with no lock held.
class Delivery {
 public:
  // Recipients are the job's nodes. Only those that are present are returned.
  class Recipients {
   public:
    virtual ~Recipients() = default;
    struct Audience {
      uint64_t epoch = 0;  // of the job
      std::vector<std::shared_ptr<ServedNode>> results;
      std::vector<std::shared_ptr<ServedNode>> receipts;
    };
    virtual Audience AudienceOf(const CompleteRound& round) = 0;
    virtual std::shared_ptr<ServedNode> Find(uint32_t node) = 0;  // null: it is not
  };

  // All but `job` must outlive it. Without `trace` nothing is traced.
  Delivery(const JoinRequest& job, ShardMetrics& metrics, TraceWriter* trace,
           Recipients& recipients);

  // Folds a complete round and sends its nodes the result, or a receipt. On error the job must
  // fail, as also after the next.
  absl::Status Deliver(const Completed& completed);
  // Sends weights at once if they are there; otherwise Deliver does, once they have been updated.
  absl::Status Answer(const Asked& asked);

  // What the node has contributed did not know of so many updates.
  void CountStaleness(uint32_t node, uint64_t staleness) const;
  // So many bytes came that go on to another node as they are.
  void CountPassedOn(uint64_t bytes);
  // Fills in what has been delivered.
  void Report(JobReport* report) const;

 private:
  // When a complete round was folded and its weights updated; without an update both end at once.
  struct Times {
    TimePoint begin;
    TimePoint folded;
    TimePoint end;
  };

  // Updates the weights, if the round does, or keeps the mean for the round that does.
  absl::StatusOr<AppliedUpdate> Apply(const Completed& completed, RoundResult mean) const;
  // Sends the weights of the moment to all whom the round answers.
  absl::Status GiveWeights(const Completed& completed);
  // Sends weights to those who have waited for this update.
  void AnswerAsks(const Completed& completed, const AppliedUpdate& applied);
  void Send(const Versions::Ask& ask, AppliedUpdate given, double raw_bytes);
  // Counts a result that goes to `nodes` nodes.
  void Count(const RoundResult& result, double raw_bytes, size_t nodes, const Times& times);
  void CountSent(double wire_bytes, double raw_bytes);
  // The residual that a round needed is gone.
  void NoteLostResidual();
  void Trace(const Completed& completed, const AppliedUpdate& applied, const Times& times) const;

  const std::string job_;
  const uint32_t world_size_;
  const uint32_t shard_;
  ShardMetrics& metrics_;
  const std::vector<Counter*> stale_updates_;  // by node
  const JobTrace trace_;
  Recipients& recipients_;
  // These are the job's part of the shard's metrics.
  Counter rounds_;
  Counter nonfinite_;
  Counter fold_seconds_;
  Counter update_seconds_;
  Counter raw_bytes_;
  Counter wire_bytes_;
  std::atomic<bool> has_lost_residuals_ = false;
};

}  // namespace thalweg
