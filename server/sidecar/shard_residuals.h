// What shards have left out of a codec's results, fetched for a checkpoint and put back after one.
// It is the same for all nodes, so one of them does that.
#pragma once

#include "absl/status/status.h"
#include "core/base/clock.h"
#include "server/sidecar/codec/bucket_codec.h"
#include "server/sidecar/shard_group.h"

namespace thalweg {

// Fetches into the codec's state what shards hold of its chunks, each within `timeout`. No round
// may be in flight. Blocks.
absl::Status ReadShardResiduals(ShardGroup& shards, BucketCodec& codec, Duration timeout);

// Gives the shards what a loaded state has of `part`'s chunks, and forgets it. Comes before the
// part's next round. Blocks.
absl::Status WriteShardResiduals(ShardGroup& shards, BucketCodec& codec, const Part& part,
                                 Duration timeout);

}  // namespace thalweg
