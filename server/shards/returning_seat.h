// ReturningSeat is a node's place in a job on a shard that may be restarted: the membership that it
// has there now, and how it gets the next one.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/mutex.h"
#include "core/exchange/shard.h"
#include "server/base/metrics.h"
#include "server/shards/round_ledger.h"

namespace thalweg {

// A ReturningSeat is thread-safe. The shard, through the events that it was given, the thread that
// runs ReturnLoop and the member share it.
class ReturningSeat : public std::enable_shared_from_this<ReturningSeat> {
 public:
  struct Metrics {
    Counter& returns;
    Gauge& kept_bytes;
  };
  // A Place is one of the memberships that follow each other.
  struct Place {
    std::shared_ptr<Member> member;
    uint64_t incarnation = 0;  // counts memberships
  };

  // The shard must outlive the seat's leaving and ReturnLoop; `metrics` must outlive the seat.
  ReturningSeat(Shard& shard, Duration patience, const Metrics& metrics)
      : shard_(shard), patience_(patience), metrics_(metrics) {}

  // Joins for the first time. Call once, before everything else.
  absl::Status Join(const JoinRequest& request, std::shared_ptr<MemberEvents> events,
                    TimePoint deadline);
  // Instead of that: takes up a job in which this node had a place before it was restarted.
  // `agreed` are the terms of then, and `ledger` has the buckets, groups and last results of then;
  // the request, which otherwise is as it was then, need not name their rounds.
  absl::Status TakeUp(const JoinRequest& request, const Terms& agreed, RoundLedger ledger,
                      std::shared_ptr<MemberEvents> events, TimePoint deadline);
  // Waits until the node has to return, returns, and so on, until it leaves or the job fails.
  void ReturnLoop();

  const Terms& terms() const { return agreed_; }
  // Waits until the shard has everything, in a later incarnation than `after`.
  absl::StatusOr<Place> Await(uint64_t after, TimePoint deadline);
  // Returns the member that has everything; null while the node returns, or has left.
  std::shared_ptr<Member> Present();

  // Remember what the shard may need again. The last returns Present(), or why the job is over.
  void NoteBucket(const BucketAnnouncement& bucket);
  void NoteGroup(const Group& group);
  absl::StatusOr<std::shared_ptr<Member>> NoteContribution(const Contribution& contribution);

  // Ends the membership of the moment, and all attempts to get another. Idempotent.
  void Leave(const absl::Status& reason);

 private:
  class Listener;

  void OnResult(uint64_t incarnation, RoundResult result);
  void OnFailed(uint64_t incarnation, absl::Status why);

  // Returns to the shard, unless the node leaves, or patience is over.
  absl::Status Return();
  // Tries to join until it succeeds, the node leaves, or `deadline`.
  absl::Status KeepTrying(TimePoint deadline);
  absl::Status TryToReturn(TimePoint deadline);
  // Gives the shard what it needs and lets contributions pass.
  absl::Status PutBack(Member& member, TimePoint deadline);
  void Fail(const absl::Status& why);
  // Returns why the shard is away for good: DataLoss if it has kept weights.
  absl::Status GoneLocked(const absl::Status& why) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Shard& shard_;
  const Duration patience_;
  const Metrics metrics_;
  // These are set by Join or TakeUp.
  JoinRequest request_;
  Terms agreed_;

  Mutex mutex_;
  CondVar changed_;
  RoundLedger ledger_ ABSL_GUARDED_BY(mutex_);
  bool keeps_weights_ ABSL_GUARDED_BY(mutex_) = false;  // the shard does, of a bucket at least
  std::shared_ptr<MemberEvents> events_ ABSL_GUARDED_BY(mutex_);  // null when calls must stop
  std::shared_ptr<Member> member_ ABSL_GUARDED_BY(mutex_);        // null: there is none to leave
  // What an earlier membership still says does not count.
  uint64_t incarnation_ ABSL_GUARDED_BY(mutex_) = 0;
  bool is_up_ ABSL_GUARDED_BY(mutex_) = false;  // the shard has everything
  absl::Status lost_ ABSL_GUARDED_BY(mutex_);   // how this membership has ended
  absl::Status end_ ABSL_GUARDED_BY(mutex_);    // why there will be no other one
};

}  // namespace thalweg
