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

  // `connection` must outlive it.
  explicit Collectives(Connection& connection) : connection_(connection) {}

  // Must come before the group's first collective.
  absl::Status MakeGroup(const WorkerGroup& group);
  // Begins a collective; the group's begin in the order of these calls. `done` is kept for
  // Collected and Fail. Does not wait for other workers. An error is returned instead of `done`'s
  // call.
  absl::Status Start(CollectiveCall call, Done done);
  absl::Status Start(PeerCall call, Done done);

  // A Finished collective's result is still to be copied out; Finish does that, and calls `done`.
  struct Finished {
    ipc::Collected message;
    std::shared_ptr<const BucketArena> arena;
    std::vector<std::span<std::byte>> got;
    std::function<void(uint32_t)> from;
    Done done;
  };
  // Messages of the sidecar. InvalidArgument: they contradict what is in flight.
  absl::Status OnShareArena(const ipc::ShareArena& message, UniqueFd fd);
  absl::StatusOr<Finished> OnCollected(ipc::Collected message);
  absl::Status OnTaken(const ipc::Taken& message);
  void Finish(const Finished& finished);

  // Takes everything out that is in flight: the session has failed.
  std::vector<Done> TakeAll();
  // Returns what is late at `now`, e.g. "allreduce 7 of group 'default'"; empty: nothing.
  std::string Late(TimePoint now) const;
  // Returns since when the oldest is in flight; nothing if none is.
  std::optional<TimePoint> Since() const;

 private:
  using Key = std::pair<uint32_t, uint64_t>;  // group and sequence, or 0 and the PeerCall's number
  struct Pending {
    const char* what = "";
    uint32_t group = 0;
    std::vector<std::span<std::byte>> got;
    std::function<void(uint32_t)> from;
    Done done;
    TimePoint since;
    Duration timeout{};
  };
  // Each is used by one collective at a time.
  struct Arena {
    uint32_t number = 0;
    BucketArena memory;
  };
  absl::StatusOr<std::shared_ptr<Arena>> TakeArena(uint64_t bytes);
  absl::Status Announce(const Key& key, Pending pending, std::shared_ptr<Arena> arena,
                        const ipc::Message& message);

  Connection& connection_;

  // Held while a collective is announced, so that the sidecar hears of a group's in order.
  Mutex starting_;
  std::map<uint32_t, uint64_t> sequences_ ABSL_GUARDED_BY(starting_);  // the last, by Key's group

  mutable Mutex mutex_;
  std::map<uint32_t, std::string> names_ ABSL_GUARDED_BY(mutex_);  // by group
  std::map<Key, Pending> pending_ ABSL_GUARDED_BY(mutex_);
  std::map<Key, std::shared_ptr<Arena>> lent_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<Arena>> free_ ABSL_GUARDED_BY(mutex_);
  uint32_t num_arenas_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<uint32_t, std::shared_ptr<const BucketArena>> results_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace thalweg
