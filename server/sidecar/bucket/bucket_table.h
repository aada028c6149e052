// The buckets of a job on this node, by index, as its workers have announced them.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "core/base/mutex.h"
#include "core/base/unique_fd.h"
#include "core/ipc/message.h"
#include "server/shards/shard_group.h"
#include "server/sidecar/bucket/codec_states.h"
#include "server/sidecar/bucket/job_compression.h"
#include "server/sidecar/bucket/node_bucket.h"

namespace thalweg {

// Thread-safe.
class BucketTable {
 public:
  // All must outlive the table.
  BucketTable(CodecStates& states, JobCompression& compression, ShardGroup& shards)
      : states_(states), compression_(compression), shards_(shards) {}

  // Accepts announcements from now on.
  void Open(const BucketTerms& terms);

  // Takes a worker's announcement: `owner` names the worker for messages, `input` is its arena. The
  // first worker that announces a layout makes the bucket, which replaces the earlier layout of the
  // same index; that one stays, without the workers' shares, until TakeReplaced. A bucket with an
  // update is announced to the shards at once, before any later one: all nodes must announce these
  // in the same order. May wait for a device, for those shards, and for other announcements.
  // Errors: FailedPrecondition (the table is not open, a newer layout is there, a round of the
  // earlier one is in flight), InvalidArgument (the layout or update differs from another worker's,
  // the input is not what it says, or as NodeBucket::Create), the shards'.
  absl::StatusOr<std::shared_ptr<NodeBucket>> Announce(uint32_t local_rank,
                                                       const std::string& owner,
                                                       const ipc::RegisterBucket& message,
                                                       UniqueFd input);

  // Null when there is no such bucket.
  std::shared_ptr<NodeBucket> Find(uint32_t index) const;
  std::vector<std::shared_ptr<NodeBucket>> All() const;  // by index
  // Returns the quarter of the model that a bucket is in, from 1, in the order of a forward pass:
  // the bucket with the highest index comes first.
  size_t QuarterOf(uint32_t index) const;
  // Lets go of what the bucket has replaced, which the caller frees without locks. When its second
  // round begins, no worker has earlier results open any more.
  std::vector<std::shared_ptr<NodeBucket>> TakeReplaced(uint32_t index);

 private:
  absl::StatusOr<std::shared_ptr<NodeBucket>> MakeBucket(const std::shared_ptr<NodeBucket>& earlier,
                                                         const std::string& owner,
                                                         const ipc::RegisterBucket& message)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(announcing_);

  std::vector<std::shared_ptr<NodeBucket>> Replaced(uint32_t index) const;

  CodecStates& states_;
  JobCompression& compression_;
  ShardGroup& shards_;

  Mutex announcing_;  // one announcement at a time; held while a device or shard works
  std::optional<BucketTerms> terms_ ABSL_GUARDED_BY(announcing_);

  mutable Mutex mutex_;
  std::map<uint32_t, std::shared_ptr<NodeBucket>> buckets_ ABSL_GUARDED_BY(mutex_);
  // Workers may have results of these open, whose memory must not be freed then; by index.
  std::map<uint32_t, std::vector<std::shared_ptr<NodeBucket>>> replaced_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace thalweg
