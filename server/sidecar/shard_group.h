// A job's memberships on all its aggregator shards, used as one.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "core/base/exchange.h"
#include "core/base/metrics.h"
#include "core/base/mutex.h"
#include "core/base/trace.h"
#include "server/sidecar/placement.h"

namespace thalweg {

// Thread-safe. Sinks may be called from shards' threads from Join on.
class ShardGroup {
 public:
  // The shards, metrics and `trace` must outlive the group. With `trace`, which may be null, it
  // compares its clock with the shards'.
  ShardGroup(std::vector<Shard*> shards, MetricRegistry& metrics, TraceWriter* trace = nullptr);

  // Measures the link, then joins and attaches to every shard; `make_sink(k)` gives shard k's sink.
  // Blocks until all nodes of the job are there, at most until `deadline`. On error the caller
  // leaves.
  absl::Status Join(JoinRequest request,
                    const std::function<std::shared_ptr<NodeSink>(uint32_t)>& make_sink,
                    TimePoint deadline);
  // Announces a bucket or part to all shards and returns which shard sums each of its chunks. All
  // nodes must announce those of one part number in the same order.
  absl::StatusOr<std::vector<uint32_t>> RegisterBucket(BucketAnnouncement bucket,
                                                       const ChunkPlan& plan, TimePoint deadline);
  // Sends a chunk to `shard` in the current epoch, after waiting until `deadline` for a place in
  // its window. Each part number has a window of its own. As long as all nodes send what has one
  // number in one order, and nothing with a lower number waits for a higher one, no two nodes can
  // wait for each other.
  absl::Status Contribute(uint32_t shard, Contribution contribution, TimePoint deadline);
  // Whether Contribute to part 0 would not wait, as long as nobody else contributes.
  bool HasPlace(uint32_t shard);
  // A result of `shard` for `part` has come: its place in the window is free.
  void OnAnswered(uint32_t shard, uint32_t part);

  // What `shard` has left out of the results of a chunk so far; empty: nothing. Both between
  // rounds.
  absl::StatusOr<std::vector<float>> ReadResidual(uint32_t shard, BucketId bucket, uint32_t chunk,
                                                  TimePoint deadline);
  absl::Status WriteResidual(uint32_t shard, BucketId bucket, uint32_t chunk,
                             std::span<const float> residual, TimePoint deadline);

  // Those that owe results, for messages: "aggregator shard 1 (2 results)", separated by commas.
  std::string Debtors();

  absl::Status Heartbeat();
  // Ends all memberships, with OK or for `reason`; waits that are in progress return it.
  // Idempotent.
  void Leave(const absl::Status& reason);

  uint32_t size() const { return static_cast<uint32_t>(shards_.size()); }
  // What all nodes have agreed on, from Join on: the slowest link, the largest costs.
  Membership agreed();

 private:
  struct State {
    std::optional<Membership> membership;
    // Chunks contributed and not answered, by part.
    std::array<uint32_t, kMaxParts> outstanding{};
    Counter* wait_seconds = nullptr;
  };

  absl::StatusOr<SessionToken> Token(uint32_t shard);
  absl::Status Heartbeat(uint32_t shard, SessionToken token);
  absl::Status LeftLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::vector<Shard*> shards_;
  TraceWriter* const trace_;

  Mutex mutex_;
  CondVar changed_;
  bool left_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status left_because_ ABSL_GUARDED_BY(mutex_);
  std::vector<State> states_ ABSL_GUARDED_BY(mutex_);  // by shard
  // By part, from Join on: parts of different numbers are announced in an order of their own.
  std::vector<Placement> placements_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace thalweg
