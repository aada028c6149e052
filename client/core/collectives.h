// What is in flight of a worker's collectives, and the memory that it shares with the sidecar.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/core/collective_call.h"
#include "core/base/clock.h"
#include "core/base/mutex.h"
#include "core/ipc/bucket_arena.h"
#include "core/ipc/connection.h"
#include "core/ipc/message.h"

namespace thalweg {

// Collectives keeps what is in flight, and the arenas, which are used again and again. Thread-safe.
class Collectives {
 public:
  using Done = std::function<void(absl::Status)>;

  using Tell = std::function<absl::Status(const ipc::Message&, int fd)>;
  // `tell` sends to the sidecar.
  explicit Collectives(Tell tell) : tell_(std::move(tell)) {}

  // Must come before the group's first collective.
  absl::Status MakeGroup(const WorkerGroup& group);
  // Begins a collective; a group's begin in the order of these calls. `done` is kept for
  // OnCollected and TakeAll. Does not wait for other workers. An error is returned instead of
  // `done`'s call.
  //
  // `lane` is that of Completions on which `done` is to be called. What is begun by callbacks has
  // an order of its own among the group's workers, because it may come before or after what their
  // other threads begin: it belongs to a group with the same members for each lane but the first.
  absl::Status Start(CollectiveCall call, int lane, Done done);
  absl::Status Start(PeerCall call, int lane, Done done);

  // A Finished collective's result is still to be copied out; Finish does that, and calls `done`.
  struct Finished {
    int lane = 0;
    ipc::Collected message;
    std::shared_ptr<const BucketArena> arena;
    std::vector<std::span<std::byte>> got;
    std::function<void(uint32_t)> from;
    std::map<uint64_t, uint64_t> copied;  // ends of parts that are, by their beginnings
    Done done;
  };
  // Messages of the sidecar. InvalidArgument: they contradict what is in flight.
  absl::Status OnShareArena(const ipc::ShareArena& message, UniqueFd fd);
  // Copies what is there already of a result, unless something else is to be copied before.
  absl::Status OnCollectedPart(const ipc::CollectedPart& message);
  // Returns what is to be finished now: a group's collectives in the order in which they began, so
  // that all workers' callbacks begin further ones in the same order. Messages do not wait.
  absl::StatusOr<std::vector<Finished>> OnCollected(ipc::Collected message);
  absl::Status OnTaken(const ipc::Taken& message);
  void Finish(const Finished& finished);

  // Takes everything out that is not finished, with its lane: the session has failed.
  std::vector<std::pair<int, Done>> TakeAll();
  // Gives arenas up that no collective has had since kArenaIdleTime: the sidecar gets an empty one
  // in the place of each.
  absl::Status GiveUpIdle(TimePoint now);
  // Gives up the memory that is shared with the sidecar, which sends nothing any more.
  void Release();
  // Says whether the sidecar knows of a group.
  bool has_groups() const;
  // Returns since when the oldest is in flight; nothing if none is.
  std::optional<TimePoint> Since() const;

 private:
  using Key = std::pair<uint32_t, uint64_t>;  // group and sequence, or 0 and the PeerCall's number
  struct Pending {
    const char* what = "";
    uint32_t group = 0;
    int lane = 0;
    std::vector<std::span<std::byte>> got;
    std::function<void(uint32_t)> from;
    Done done;
    TimePoint since;
    bool is_given = false;  // what this worker gives need not be read any more
    std::map<uint64_t, uint64_t> copied;
  };
  // Each is used by one collective at a time.
  struct Arena {
    uint32_t number = 0;
    BucketArena memory;
    TimePoint last_used = {};
  };
  absl::StatusOr<std::shared_ptr<Arena>> TakeArena(uint64_t bytes);
  // Returns the number of the group whose collectives `lane` begins, making it if necessary.
  absl::StatusOr<uint32_t> GroupOf(uint32_t group, int lane)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(starting_);
  absl::Status Announce(const Key& key, Pending pending, std::shared_ptr<Arena> arena,
                        const ipc::Message& message);

  const Tell tell_;

  // Held while a collective is announced, so that the sidecar hears of a group's in order.
  Mutex starting_;
  std::map<uint32_t, uint64_t> sequences_ ABSL_GUARDED_BY(starting_);  // the last, by Key's group

  mutable Mutex mutex_;
  std::map<uint32_t, WorkerGroup> groups_ ABSL_GUARDED_BY(mutex_);  // by number
  std::map<Key, Pending> pending_ ABSL_GUARDED_BY(mutex_);
  std::map<Key, Finished> finished_ ABSL_GUARDED_BY(mutex_);     // an earlier one is pending
  std::map<uint32_t, uint64_t> copied_ ABSL_GUARDED_BY(mutex_);  // the last sequence, by group
  std::map<Key, std::shared_ptr<Arena>> lent_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<Arena>> free_ ABSL_GUARDED_BY(mutex_);
  uint32_t num_arenas_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<uint32_t> spare_ ABSL_GUARDED_BY(mutex_);  // numbers of those that were given up
  std::map<uint32_t, std::shared_ptr<const BucketArena>> results_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace thalweg
