// PostOffice takes messages from a node's workers to other workers of their groups, on this node or
// on others.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/clock.h"
#include "core/base/mutex.h"
#include "core/exchange/rounds.h"
#include "core/ipc/message.h"
#include "server/base/metrics.h"
#include "server/shards/shard_group.h"
#include "server/sidecar/collective/arenas.h"
#include "server/sidecar/collective/collective_listener.h"
#include "server/sidecar/job/progress.h"
#include "server/sidecar/letters/correspondence.h"
#include "server/sidecar/letters/mailbox.h"
#include "server/sidecar/letters/message.h"
#include "server/sidecar/letters/open_calls.h"

namespace thalweg {

// A message is offered to the receiver's node, which asks for its bytes when the receiver has come;
// a short one comes with the offer, and its sender does not wait. Nothing here waits for anyone.
// Thread-safe.
class PostOffice {
 public:
  static constexpr uint64_t kMostOnTheWay = 4 << 20;  // bytes that one node has asked for

  // The parts of the job that it uses; all must outlive it.
  struct Context {
    Progress& progress;
    ShardGroup& shards;
    Arenas& arenas;
    Counter& received;
  };
  struct Terms {
    uint32_t node = 0;
    uint32_t num_nodes = 1;
    std::vector<uint32_t> hosts;  // by shard: the node that hosts it, or kNoHost; may be empty
  };

  PostOffice(Terms terms, const Context& context, CollectiveListener& listener);

  // Learns who is where; CollectiveRunner has checked the message.
  void MakeGroup(uint32_t local_rank, const ipc::MakeGroup& message);
  // InvalidArgument: the worker is in no such group, or the message contradicts itself.
  absl::Status Send(uint32_t local_rank, ipc::Send message);
  absl::Status Receive(uint32_t local_rank, const ipc::Receive& message);
  absl::Status Take(uint32_t local_rank, const ipc::Taken& message);
  // Requires IsLetter(letter.id).
  void OnLetter(const RoundResult& letter);
  // A worker has left; returns Aborted when another waits for what it sends.
  absl::Status OnWorkerLeft(uint32_t local_rank, const std::string& name) {
    MutexLock lock(mutex_);
    return calls_.NoteLeft(local_rank, name);
  }

  // All workers of this node have left. Takes for received what others have sent to them, and waits
  // until the others have received what they have sent, and have taken all letters; at most until
  // `deadline`, or until Wake() finds that the job `has_ended`. Returns how many messages nobody
  // has received by then.
  size_t Drain(TimePoint deadline, const std::function<bool()>& has_ended);
  void Wake() {
    MutexLock lock(mutex_);
    changed_.NotifyAll();
  }

  // Returns DeadlineExceeded, naming worker, peer and tag, when a message did not pass in time.
  // See OpenCalls.
  absl::Status CheckLate(TimePoint now, TimePoint awake_since) const {
    MutexLock lock(mutex_);
    return calls_.CheckLate(now, awake_since);
  }
  // Says whether any worker waits.
  bool IsBusy() const {
    MutexLock lock(mutex_);
    return !calls_.empty();
  }

 private:
  using MessageId = std::pair<uint32_t, uint64_t>;  // the other node, and the message's number
  struct GroupState {
    std::string name;
    std::vector<uint32_t> nodes;               // by rank
    std::map<uint32_t, uint32_t> ranks;        // by local rank
    std::map<uint32_t, uint32_t> local_ranks;  // by rank
  };
  absl::StatusOr<GroupState*> FindLocked(uint32_t local_rank, uint32_t group, uint32_t peer)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // These return what is still to be copied.
  using Copies = std::vector<std::function<void()>>;
  absl::Status MatchedLocked(const std::shared_ptr<Receiving>& receive, Copies& copies)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status ReadLocked(uint32_t node, OpenedLetter letter, Copies& copies)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void OfferLocked(const std::shared_ptr<Sending>& sending) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // These three are in post_office_bodies.cc.
  absl::Status SendBodyLocked(uint32_t node, const Letter& request, Copies& copies)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Asks senders for more, as far as memory on the way allows.
  void AskLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void NoteReceived(const std::shared_ptr<Receiving>& receive, uint64_t bytes);
  void SentLocked(Sending& sending) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Tells the sender of a short message that it need not wait for it any longer.
  void DismissLocked(const Offer& offer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Correspondence& WithLocked(uint32_t node) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Does what is to be done without the lock, in order, unless another thread is at it.
  void Act();
  absl::Status PostNext(uint32_t node);
  uint64_t BodyBytes() const { return context_.shards.agreed().chunk_bytes - kLetterHeadBytes; }

  const Terms terms_;
  const Context context_;
  CollectiveListener& listener_;
  const uint32_t window_;       // letters on the way between two nodes
  const uint64_t short_bytes_;  // the longest message that comes with its offer

  mutable Mutex mutex_;
  CondVar changed_;  // for Drain
  bool is_draining_ ABSL_GUARDED_BY(mutex_) = false;
  std::map<uint32_t, GroupState> groups_ ABSL_GUARDED_BY(mutex_);
  std::map<std::pair<uint32_t, uint32_t>, Mailbox> mailboxes_
      ABSL_GUARDED_BY(mutex_);  // by group and rank
  OpenCalls calls_ ABSL_GUARDED_BY(mutex_);
  std::map<OpenCalls::Id, std::shared_ptr<ResultArena>> results_ ABSL_GUARDED_BY(mutex_);
  std::map<uint32_t, Correspondence> with_ ABSL_GUARDED_BY(mutex_);  // by node
  std::map<uint32_t, uint64_t> messages_ ABSL_GUARDED_BY(mutex_);    // the last, by receiver's node
  // Bytes from workers of this node, by receiver, as mailboxes_.
  std::map<std::pair<uint32_t, uint32_t>, uint64_t> unreceived_ ABSL_GUARDED_BY(mutex_);
  std::map<uint32_t, uint64_t> unasked_ ABSL_GUARDED_BY(mutex_);  // short bytes, by receiver's node
  std::map<MessageId, std::shared_ptr<Sending>> sending_ ABSL_GUARDED_BY(mutex_);
  std::map<MessageId, std::shared_ptr<Receiving>> receiving_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::shared_ptr<Receiving>> hungry_ ABSL_GUARDED_BY(mutex_);  // want more bytes
  uint64_t on_the_way_ ABSL_GUARDED_BY(mutex_) = 0;  // bytes asked for and not here yet
  std::deque<std::function<absl::Status()>> actions_ ABSL_GUARDED_BY(mutex_);
  bool is_acting_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace thalweg
