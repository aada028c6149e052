// This header reads what shards have left out of a codec's results for a checkpoint, and restores
// it. It is the same for all nodes, so one of them does that.
#pragma once

#include <functional>

#include "absl/status/status.h"
#include "core/base/clock.h"
#include "server/shards/shard_group.h"
#include "server/sidecar/codec/bucket_codec.h"

namespace thalweg {

// Reads into the codec's state what shards hold of its chunks, each within `timeout`, and calls
// `alive` after each. No round may be in flight. Blocks.
absl::Status ReadShardResiduals(ShardGroup& shards, BucketCodec& codec, Duration timeout,
                                const std::function<void()>& alive);

// Gives the shards what a loaded state has of `part`'s chunks, and drops it from the state. Must
// come before the part's next round. Blocks.
absl::Status WriteShardResiduals(ShardGroup& shards, BucketCodec& codec, const Part& part,
                                 Duration timeout);

}  // namespace thalweg
