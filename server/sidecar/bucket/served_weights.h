// ServedWeights is what a node's workers have to say to the shards of the weights that these keep:
// the settings of updates, slices of buckets to read and to replace, and snapshots.
#pragma once

#include <functional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/clock.h"
#include "core/base/mutex.h"
#include "core/ipc/bucket_arena.h"
#include "core/ipc/message.h"
#include "server/round/step_settings.h"
#include "server/shards/shard_group.h"
#include "server/sidecar/bucket/bucket_table.h"

namespace thalweg {

// Thread-safe. Calls block while shards answer, each time for `patience` at most, and while they
// read snapshots of any size for `restoring`.
class ServedWeights {
 public:
  // Buckets and shards must outlive this.
  ServedWeights(const BucketTable& buckets, ShardGroup& shards, Duration patience,
                Duration restoring)
      : buckets_(buckets), shards_(shards), patience_(patience), restoring_(restoring) {}

  // The worker called `owner` has announced settings: the first one's go to the shards.
  // InvalidArgument: other workers of the node, or other nodes, have announced different ones.
  absl::Status SetSettings(const std::string& owner, const ipc::SetSettings& message);

  // This and the next two call `alive` from time to time. Does what a worker asks of snapshots,
  // with all shards: takes one if none of them is writing, restores one, or only lists what all
  // have.
  using Alive = std::function<void()>;
  absl::StatusOr<ipc::Snapshots> Snapshots(const ipc::GetSnapshots& message, const Alive& alive);

  // FailedPrecondition: there is no such bucket, a round of it is in flight, or its weights have
  // been written in part only.
  // Returns the answer, and the arena that goes with it.
  absl::StatusOr<std::pair<ipc::Weights, BucketArena>> Read(const ipc::GetWeights& message,
                                                            const Alive& alive);
  // InvalidArgument also: the slice is not as long as the bucket.
  absl::Status Write(const ipc::Weights& message, UniqueFd fd, const Alive& alive);

 private:
  // Returns the bucket, whose weights are on the shards and not in use.
  absl::StatusOr<std::shared_ptr<NodeBucket>> Find(BucketId id) const;
  absl::StatusOr<SnapshotReport> Restore(const SnapshotCall& call, const Alive& alive);

  const BucketTable& buckets_;
  ShardGroup& shards_;
  const Duration patience_, restoring_;

  Mutex mutex_;
  StepSettings settings_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace thalweg
