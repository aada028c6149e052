// The steps of compression that follow a bucket's first parts: which codec goes on next.
#pragma once

#include <deque>
#include <memory>
#include <optional>

#include "core/base/mutex.h"
#include "server/sidecar/bucket/node_bucket.h"
#include "server/sidecar/job/job_outcome.h"

namespace thalweg {

// A codec at work on a bucket whose round runs, with one of its parts.
struct Step {
  std::shared_ptr<NodeBucket> bucket;
  BucketCodec* codec = nullptr;
  Part* part = nullptr;
};

// Thread-safe. What follows a first part is sent in the order of the first parts, which is the same
// on all nodes: see ShardGroup::Contribute. Later parts are taken as they come, but for those that
// another one may follow: these keep that order.
class StepQueue {
 public:
  // `outcome` must outlive the queue; whoever changes it calls Wake.
  explicit StepQueue(const JobOutcome& outcome) : outcome_(outcome) {}

  // The part is about to be sent: the first one of its codec in this round, or a later one, which
  // another one may follow or not.
  void AddFirst(Step step);
  void AddLater(Step step, bool may_be_followed);
  // All results of a part that has been added are here.
  void NoteHere(const Part& part);

  // Waits for a part that is here and takes its step out. Null when the job does not go on.
  std::optional<Step> Next();
  // The step that was taken out has been done, or has failed.
  void NoteDone();
  // Waits until that is so of the last one, at most until `deadline`. Returns whether it is.
  bool WaitUntilIdle(TimePoint deadline);
  void Wake();

 private:
  struct Waiting {
    Step step;
    bool may_be_followed = true;
    bool is_here = false;
  };
  std::optional<Step> TakeLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const JobOutcome& outcome_;
  Mutex mutex_;
  CondVar changed_;
  CondVar idle_;
  std::deque<Waiting> first_ ABSL_GUARDED_BY(mutex_);  // in the order of sending
  std::deque<Waiting> later_ ABSL_GUARDED_BY(mutex_);
  bool is_taken_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace thalweg
