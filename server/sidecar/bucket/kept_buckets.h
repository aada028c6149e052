// KeptBuckets are a job's buckets as its workers have kept them when the node's sidecar died, for
// the process that takes the job up: the workers' gradients, the last result, and what codecs carry
// from round to round.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/clock.h"
#include "core/base/mutex.h"
#include "core/base/unique_fd.h"
#include "core/ipc/message.h"
#include "server/shards/kept_places.h"
#include "server/sidecar/bucket/bucket_table.h"
#include "server/sidecar/job/job_outcome.h"

namespace thalweg {

// Thread-safe.
class KeptBuckets {
 public:
  // The job has `local_size` workers on this node. Whoever changes the outcome, which must outlive
  // the object, calls Wake.
  KeptBuckets(uint32_t local_size, const JobOutcome& outcome)
      : outcome_(outcome), workers_(local_size) {}

  // Say what a worker brings: how many buckets; each of them; and after one with a round, its
  // result. InvalidArgument: it is not what was announced, or comes twice.
  void Expect(uint32_t local_rank, uint32_t buckets);
  absl::Status Add(uint32_t local_rank, ipc::KeptBucket bucket, UniqueFd input);
  absl::Status AddResult(uint32_t local_rank, const ipc::KeptResult& result, UniqueFd arena);
  absl::Status AddCodecMemory(uint32_t local_rank, const ipc::CodecMemory& memory, UniqueFd arena);
  // Waits until all workers have brought everything. DeadlineExceeded; the outcome's error.
  absl::Status Await(TimePoint deadline);
  void Wake();

  // What a worker is to be told of one of its buckets.
  struct Answer {
    uint32_t local_rank = 0;
    std::shared_ptr<NodeBucket> bucket;
    std::optional<ipc::Complete> missed;  // the end of a round that it has not heard of
  };
  struct Restored {
    std::vector<KeptPlaces::Bucket> buckets;
    std::vector<Answer> answers;
  };
  // Announces all to the table, in the place of the workers, and gives each bucket its last result
  // and its codecs' states. `world_size` workers have taken part in it. Requires Await.
  // InvalidArgument: workers contradict each other; the table's errors; those of
  // CodecMemory::Restore; FailedPrecondition: nobody has kept what a bucket's codecs carry.
  absl::StatusOr<Restored> Restore(BucketTable& table, uint32_t world_size,
                                   const std::function<std::string(uint32_t)>& name_of);

 private:
  struct Bucket {
    ipc::KeptBucket message;
    UniqueFd input;
    UniqueFd result;
    UniqueFd codec_memory;
  };
  struct Worker {
    std::optional<uint32_t> expected;  // nothing: it has not come
    std::map<BucketId, Bucket> buckets;
  };
  // The same bucket of all workers, by local rank.
  using Shares = std::map<uint32_t, Bucket>;

  // Returns the bucket of a worker that still waits for what one of these gives.
  absl::StatusOr<Bucket*> FindLocked(uint32_t local_rank, BucketId id, UniqueFd Bucket::* what)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static absl::Status RestoreBucket(Shares& shares, BucketTable& table, uint32_t world_size,
                                    const std::function<std::string(uint32_t)>& name_of,
                                    Restored& restored);
  // Takes what the bucket's codecs carry on after `round` from the worker that has kept it.
  static absl::Status RestoreCodecs(Shares& shares, NodeBucket& bucket, uint64_t round);
  bool IsCompleteLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const JobOutcome& outcome_;
  Mutex mutex_;
  CondVar changed_;
  std::vector<Worker> workers_ ABSL_GUARDED_BY(mutex_);  // by local rank
};

}  // namespace thalweg
