#include "server/sidecar/bucket/turn_queue.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"

namespace thalweg {

absl::StatusOr<TurnQueue::Turn> TurnQueue::Submit(const std::shared_ptr<NodeBucket>& bucket,
                                                  uint32_t local_rank,
                                                  const ipc::Submit& submission, TimePoint now,
                                                  bool may_run_at_once) {
  // One lock from the bucket's submission to its place in the queue: otherwise two buckets could
  // change places.
  MutexLock lock(mutex_);
  if (!leaver_.empty()) {
    return absl::AbortedError(absl::StrCat("bucket ", ToString(bucket->id()), " round ",
                                           submission.round, " cannot complete: ", leaver_,
                                           " has left the job"));
  }
  THALWEG_ASSIGN_OR_RETURN(const bool is_ready, bucket->Submit(local_rank, submission, now));
  if (!is_ready) return Turn::kNotReady;
  if (num_in_flight_++ == 0) in_flight_since_ = now;
  if (may_run_at_once && !is_taken_ && ready_.empty()) {
    is_taken_ = true;
    return Turn::kYours;
  }
  ready_.push_back(bucket);
  changed_.NotifyAll();
  return Turn::kQueued;
}

std::shared_ptr<NodeBucket> TurnQueue::Next() {
  MutexLock lock(mutex_);
  changed_.WaitUntil(mutex_, kUntilStopped, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return (!ready_.empty() && !is_taken_) || !outcome_.Check().ok();
  });
  if (!outcome_.Check().ok()) return nullptr;
  is_taken_ = true;
  std::shared_ptr<NodeBucket> bucket = std::move(ready_.front());
  ready_.pop_front();
  return bucket;
}

void TurnQueue::PutBack(std::shared_ptr<NodeBucket> bucket) {
  MutexLock lock(mutex_);
  ready_.push_front(std::move(bucket));
}

void TurnQueue::EndTurn() {
  MutexLock lock(mutex_);
  is_taken_ = false;
  if (!ready_.empty()) changed_.NotifyAll();
  idle_.NotifyAll();
}

Duration TurnQueue::EndRound(TimePoint now) {
  MutexLock lock(mutex_);
  return --num_in_flight_ == 0 ? now - in_flight_since_ : Duration::zero();
}

void TurnQueue::NoteLeft(const std::string& name) {
  MutexLock lock(mutex_);
  if (leaver_.empty()) leaver_ = name;
}

void TurnQueue::WaitUntilIdle(TimePoint deadline) {
  MutexLock lock(mutex_);
  idle_.WaitUntil(mutex_, deadline,
                  [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !is_taken_; });
}

void TurnQueue::Wake() {
  MutexLock lock(mutex_);
  changed_.NotifyAll();
}

}  // namespace thalweg
