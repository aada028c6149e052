// The memory of collectives that workers and sidecar share.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/clock.h"
#include "core/base/mutex.h"
#include "core/base/unique_fd.h"
#include "core/ipc/bucket_arena.h"
#include "core/ipc/message.h"

namespace thalweg {

// An arena of the sidecar's for results, with its number.
struct ResultArena {
  uint32_t number = 0;
  BucketArena arena;
  TimePoint last_used = {};
};

// Arenas are the workers' arenas, which the sidecar reads, and its own for results, which are used
// again and again. Thread-safe.
class Arenas {
 public:
  // Takes a worker's arena. InvalidArgument: it is not what the message says.
  absl::Status Add(uint32_t local_rank, const ipc::ShareArena& message, UniqueFd fd);
  // Returns null for number 0. InvalidArgument: the worker has no such arena.
  absl::StatusOr<std::shared_ptr<const BucketArena>> Find(uint32_t local_rank,
                                                          uint32_t number) const;

  // Returns an arena for a result of so many bytes; null if they need none. InvalidArgument: more
  // than kMaxArenaPayloadBytes. ResourceExhausted: the system has none.
  absl::StatusOr<std::shared_ptr<ResultArena>> Take(uint64_t bytes);
  void Return(std::shared_ptr<ResultArena> arena, TimePoint now);
  // Gives arenas up that no result has had since kArenaIdleTime. `tell`, which is called without a
  // lock, sends a worker an empty one in the place of each that it knows.
  using Tell = std::function<void(uint32_t local_rank, const ipc::ShareArena&, int fd)>;
  void GiveUpIdle(TimePoint now, const Tell& tell);
  // Returns whether the worker has not been told of the arena before.
  bool IsNewTo(uint32_t local_rank, const ResultArena& arena);

 private:
  mutable Mutex mutex_;
  // By local rank and number.
  std::map<std::pair<uint32_t, uint32_t>, std::shared_ptr<const BucketArena>> of_workers_
      ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<ResultArena>> free_ ABSL_GUARDED_BY(mutex_);
  uint32_t made_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<uint32_t> spare_ ABSL_GUARDED_BY(mutex_);  // numbers of those that were given up
  std::map<uint32_t, std::set<uint32_t>> known_ ABSL_GUARDED_BY(mutex_);  // by local rank
};

}  // namespace thalweg
