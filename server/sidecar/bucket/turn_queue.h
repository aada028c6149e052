// The order in which a job's buckets are taken through their rounds: the one in which they become
// ready. It is the same on all nodes, because DDP launches buckets in one order everywhere.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/clock.h"
#include "core/base/mutex.h"
#include "server/sidecar/bucket/node_bucket.h"
#include "server/sidecar/job/job_outcome.h"

namespace thalweg {

// Thread-safe. At most one thread has the turn: it takes one bucket through what comes before the
// results.
class TurnQueue {
 public:
  // `outcome` must outlive the queue; whoever changes it calls Wake.
  explicit TurnQueue(const JobOutcome& outcome) : outcome_(outcome) {}

  enum class Turn {
    kNotReady,  // other workers have to submit the round
    kQueued,    // the bucket waits for Next
    kYours,     // the caller has the turn, with this bucket
  };
  // A worker submits a round. With the last one the bucket is ready, and is queued, unless
  // `may_run_at_once` and nobody has or waits for the turn. Aborted: a worker has left; the
  // message has its name. Other errors as NodeBucket::Submit.
  absl::StatusOr<Turn> Submit(const std::shared_ptr<NodeBucket>& bucket, uint32_t local_rank,
                              const ipc::Submit& submission, TimePoint now, bool may_run_at_once);

  // Waits for a bucket and for the turn. Returns null when the job does not go on.
  std::shared_ptr<NodeBucket> Next();
  // Whoever has the turn leaves its bucket, which comes first, to the next one.
  void PutBack(std::shared_ptr<NodeBucket> bucket);
  void EndTurn();

  // A round that was ready is over. Returns how long the job has had rounds in flight without a
  // break when that was the last one; otherwise zero.
  Duration EndRound(TimePoint now);

  // Worker `name` submits nothing any more: from now on Submit refuses all rounds.
  void NoteLeft(const std::string& name);
  // Waits until nobody has the turn, or until `deadline`.
  void WaitUntilIdle(TimePoint deadline);
  void Wake();

 private:
  const JobOutcome& outcome_;
  Mutex mutex_;
  CondVar changed_;  // a bucket is ready and the turn free, or the outcome has changed
  CondVar idle_;     // the turn is free
  std::string leaver_ ABSL_GUARDED_BY(mutex_);  // the first worker that has left; empty: none has
  std::deque<std::shared_ptr<NodeBucket>> ready_ ABSL_GUARDED_BY(mutex_);
  bool is_taken_ ABSL_GUARDED_BY(mutex_) = false;       // somebody has the turn
  uint32_t num_in_flight_ ABSL_GUARDED_BY(mutex_) = 0;  // buckets
  TimePoint in_flight_since_ ABSL_GUARDED_BY(mutex_);   // any bucket
};

}  // namespace thalweg
