// ShardGroup combines a job's memberships on all its aggregator shards.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <stop_token>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "core/base/mutex.h"
#include "core/base/trace.h"
#include "core/exchange/shard.h"
#include "server/base/metrics.h"
#include "server/plan/share_plan.h"
#include "server/shards/kept_places.h"
#include "server/shards/placement.h"
#include "server/shards/send_lane.h"

namespace thalweg {

// It is thread-safe. Shards' threads report events from Join on.
class ShardGroup {
 public:
  // The shards must outlive the group's leaving, metrics and `trace` the group. With `trace`, which
  // may be null, it compares its clock with the shards'.
  ShardGroup(std::vector<Shard*> shards, MetricRegistry& metrics, TraceWriter* trace = nullptr);

  // Measures links (server/plan/link_rates.h), then joins every shard; `events_of(k)` hears what
  // shard k says. `request.hosts`, if any, is by shard of this group. Blocks
  // until all nodes of the job have joined, at most until `deadline`. On an error the caller must
  // leave.
  absl::Status Join(JoinRequest request,
                    const std::function<std::shared_ptr<MemberEvents>(uint32_t)>& events_of,
                    TimePoint deadline);
  // Instead of Join: takes all places up again, at the same time (Shard::TakeUp). InvalidArgument
  // also: what is kept contradicts itself.
  absl::Status TakeUp(JoinRequest request, const KeptPlaces& kept,
                      const std::function<std::shared_ptr<MemberEvents>(uint32_t)>& events_of,
                      TimePoint deadline);
  // Announces a bucket or part to all shards and returns which shard sums each of its chunks. All
  // nodes must announce those of one part number in the same order.
  absl::StatusOr<Placement::Placed> RegisterBucket(BucketAnnouncement bucket, const ChunkPlan& plan,
                                                   TimePoint deadline);
  // Declares a group at all shards; see Member::MakeGroup.
  absl::Status MakeGroup(const Group& group, TimePoint deadline);
  // Sends a chunk to `shard` in the current epoch, without blocking: while the shard owes a window
  // of results, the chunk waits in a queue, and other shards' chunks pass it. Each part number of
  // each group has a window and a queue of its own at each shard. No two nodes can wait for each
  // other as long as all nodes contribute the chunks of each of these in the same order; the
  // order between groups does not matter.
  absl::Status Contribute(uint32_t shard, Contribution contribution);
  // Sends a letter (core/exchange/rounds.h) through `shard`, without blocking. It passes what waits
  // in queues.
  absl::Status Post(uint32_t shard, Contribution letter);
  // A result of `shard` for `part` of a group's buckets has arrived: frees its place in the window,
  // and sends what has waited for it. Errors are those of Contribute.
  absl::Status OnAnswered(uint32_t shard, uint32_t group, uint32_t part);

  // Read and write what `shard` has left out of the results of a chunk so far; empty means nothing.
  // Both may be called only between rounds.
  absl::StatusOr<std::vector<float>> ReadResidual(uint32_t shard, BucketId bucket, uint32_t chunk,
                                                  TimePoint deadline);
  absl::Status WriteResidual(uint32_t shard, BucketId bucket, uint32_t chunk,
                             std::span<const float> residual, TimePoint deadline);

  // See Member, core/base/update.h. All shards are told settings.
  absl::Status SetSettings(uint64_t number, const UpdateStep& step, TimePoint deadline);
  absl::StatusOr<WeightsSlice> ReadWeights(uint32_t shard, BucketId bucket, uint32_t chunk,
                                           uint32_t slice, TimePoint deadline);
  absl::Status WriteWeights(uint32_t shard, BucketId bucket, uint32_t chunk, uint32_t slice,
                            WeightsSlice weights, TimePoint deadline);

  // Makes the same call to all shards; see Member. Returns what all of them have, and whether any
  // is writing.
  absl::StatusOr<SnapshotReport> Snapshots(const SnapshotCall& call, TimePoint deadline);

  // Returns the shards with pending results, for messages: "aggregator shard 1 (2 results)",
  // separated by commas.
  std::string PendingShards();
  // Returns those of them that have answered no heartbeat since then; empty: there are none.
  std::string SilentPendingShards(TimePoint since);

  // Tells the shard, if the group has joined it, that this node is alive, and waits for the answer,
  // at most for heartbeat_interval(). Returns the nodes that the shard has lost so far, or
  // NotFound if the shard does not know this node; the exchange reports a slow or absent shard.
  absl::StatusOr<std::vector<LostNode>> Heartbeat(uint32_t shard);
  // Ends all memberships at the same time, with OK or for `reason`, and a Join that waits; later
  // calls return it. Idempotent.
  void Leave(const absl::Status& reason);

  uint32_t size() const { return static_cast<uint32_t>(shards_.size()); }
  Duration heartbeat_interval() const { return HeartbeatInterval(size()); }
  // Returns what all nodes have agreed on, from Join on: the slowest link, the largest costs.
  Terms agreed();
  // Returns the epoch of each membership, from Join on.
  std::vector<uint64_t> epochs();
  // Returns which part of the gradients each shard sums, from Join on: the shards' weights if any
  // is set, then without a forecast, otherwise what the first shard has chosen.
  SharePlan plan();

 private:
  struct State {
    std::unique_ptr<Member> member;  // null until the shard is joined, then kept
    TimePoint last_heard;
    Counter* wait_seconds = nullptr;
    Gauge* share = nullptr;
  };

  // Measures this node's part of the job's links; fills in the request's link and rates.
  absl::Status MeasureLinks(JoinRequest* request, TimePoint deadline);
  // Fills in what this node has in its place on a shard.
  static KeptSeat SeatOf(uint32_t shard, const KeptPlaces& kept);
  absl::Status SetMember(uint32_t shard, std::unique_ptr<Member> member);
  // From now on buckets can be announced.
  void Open(SharePlan plan, uint32_t window_chunks, std::vector<Placement> placements);
  // Returns the member, or why there is none.
  absl::StatusOr<Member*> MemberOf(uint32_t shard);
  // Calls all members at the same time; returns the first shard's error.
  absl::Status CallAll(const std::function<absl::Status(Member&)>& call);
  // Declares a group to this node, with each shard's window in chunks.
  void AddLanesLocked(uint32_t group, uint32_t window_chunks) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns null if there is no such group.
  SendLane* FindLaneLocked(uint32_t group, uint32_t part) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Sends what a queue lets go; called by whoever the queue has told to send.
  absl::Status Send(uint32_t shard, uint32_t group, uint32_t part);
  absl::StatusOr<std::vector<LostNode>> CallHeartbeat(uint32_t shard, Member& member);
  absl::Status LeftLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::vector<Shard*> shards_;
  TraceWriter* const trace_;

  std::stop_source stop_;  // what waits for shards; see JoinRequest

  Mutex mutex_;
  bool left_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status left_because_ ABSL_GUARDED_BY(mutex_);
  std::vector<State> states_ ABSL_GUARDED_BY(mutex_);                        // by shard
  std::map<uint32_t, std::vector<SendLane>> lanes_ ABSL_GUARDED_BY(mutex_);  // by group, part
  SharePlan plan_ ABSL_GUARDED_BY(mutex_);
  // Placements are by part, from Join on: each part number's parts are announced in their own
  // order.
  std::vector<Placement> placements_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace thalweg
