// The state that a job's codecs carry from round to round on this node, by parameter: it outlives
// the layouts of buckets, and workers may save and load it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/clock.h"
#include "core/base/mutex.h"
#include "core/ipc/bucket_arena.h"
#include "server/shards/shard_group.h"
#include "server/sidecar/bucket/node_bucket.h"
#include "server/sidecar/codec/parameter_states.h"

namespace thalweg {

// Thread-safe. Calls may wait for a device; then only other calls wait with them.
class CodecStates {
 public:
  using Buckets = std::vector<std::shared_ptr<NodeBucket>>;

  // Makes a bucket whose codecs go on from where those of `buckets` are. Arguments as
  // NodeBucket::Create.
  absl::StatusOr<std::shared_ptr<NodeBucket>> MakeBucket(const Buckets& buckets,
                                                         const ipc::RegisterBucket& announced,
                                                         const std::string& owner,
                                                         const BucketTerms& terms,
                                                         uint32_t auto_choice);

  // Returns once nobody reads or replaces the states of a bucket's codecs. To be called with the
  // bucket in flight, before its codecs begin the round: until the round is over nobody will.
  void AwaitUse();

  // Encodes all states into an arena. With `shards`, which may be null, also what these have left
  // out of results; each read takes at most `timeout`, and `alive` is called after it.
  // FailedPrecondition: a round is in flight.
  using Alive = std::function<void()>;
  absl::StatusOr<BucketArena> Save(const Buckets& buckets, ShardGroup* shards, Duration timeout,
                                   const Alive& alive);
  // To be called on the first node before a bucket of this generation is announced: reads, once,
  // what shards have left out of the results of earlier generations, for the next rounds to hand it
  // to whichever shard sums the same elements then. Other calls wait meanwhile.
  absl::Status MoveShardResiduals(const Buckets& buckets, uint32_t generation, ShardGroup& shards,
                                  Duration timeout, const Alive& alive);
  // Puts the states that `arena` holds in the place of all that are here, and on the first node of
  // what shards have left out. Errors change nothing: FailedPrecondition (a round is in flight),
  // InvalidArgument (not states, or of other sizes).
  absl::Status Load(const Buckets& buckets, const BucketArena& arena, bool is_first_node);

 private:
  static absl::Status CheckIdle(const Buckets& buckets);
  // Brings the states that devices keep here, except those of buckets in flight.
  absl::Status CollectLocked(const Buckets& buckets) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Mutex mutex_;
  ParameterStates states_ ABSL_GUARDED_BY(mutex_);
  std::set<BucketId> moved_ ABSL_GUARDED_BY(mutex_);  // whose shards' residuals are here
};

}  // namespace thalweg
