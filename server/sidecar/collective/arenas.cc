#include "server/sidecar/collective/arenas.h"

#include <algorithm>
#include <bit>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"

namespace thalweg {

absl::Status Arenas::Add(uint32_t local_rank, const ipc::ShareArena& message, UniqueFd fd) {
  THALWEG_ASSIGN_OR_RETURN(BucketArena arena, BucketArena::Open(std::move(fd), message.bytes));
  arena.CloseFd();
  MutexLock lock(mutex_);
  of_workers_[{local_rank, message.number}] = std::make_shared<const BucketArena>(std::move(arena));
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const BucketArena>> Arenas::Find(uint32_t local_rank,
                                                                uint32_t number) const {
  if (number == 0) return nullptr;
  MutexLock lock(mutex_);
  const auto found = of_workers_.find({local_rank, number});
  if (found != of_workers_.end()) return found->second;
  return absl::InvalidArgumentError(
      absl::StrCat("local rank ", local_rank, " has no arena ", number));
}

absl::StatusOr<std::shared_ptr<ResultArena>> Arenas::Take(uint64_t bytes) {
  if (bytes <= ipc::kMaxInlineBytes) return nullptr;
  if (bytes > kMaxArenaPayloadBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("result of ", bytes, " bytes, expected at most ", kMaxArenaPayloadBytes));
  }
  const uint64_t size = std::bit_ceil(bytes);
  uint32_t number = 0;
  {
    MutexLock lock(mutex_);
    const auto fits = std::find_if(free_.begin(), free_.end(), [size](const auto& arena) {
      return arena->arena.payload_bytes() == size;
    });
    if (fits != free_.end()) {
      auto arena = std::move(*fits);
      free_.erase(fits);
      return arena;
    }
    if (spare_.empty()) spare_.push_back(++made_);
    number = spare_.back();
    spare_.pop_back();
  }
  THALWEG_ASSIGN_OR_RETURN(BucketArena arena, BucketArena::Create("thalweg-collected", size, true));
  return std::make_shared<ResultArena>(ResultArena{number, std::move(arena)});
}

void Arenas::Return(std::shared_ptr<ResultArena> arena, TimePoint now) {
  MutexLock lock(mutex_);
  arena->last_used = now;
  free_.push_back(std::move(arena));
}

void Arenas::GiveUpIdle(TimePoint now, const Tell& tell) {
  std::vector<std::shared_ptr<ResultArena>> idle;
  std::map<uint32_t, std::set<uint32_t>> known;
  {
    MutexLock lock(mutex_);
    const auto rest = std::partition(free_.begin(), free_.end(), [now](const auto& arena) {
      return now - arena->last_used < kArenaIdleTime;
    });
    idle.assign(std::make_move_iterator(rest), std::make_move_iterator(free_.end()));
    free_.erase(rest, free_.end());
    known = known_;
  }
  if (idle.empty()) return;
  const auto nothing = BucketArena::Create("thalweg-nothing", 1, true);
  if (!nothing.ok()) return;  // no number is used again
  for (const auto& arena : idle) {
    for (const auto& [local_rank, numbers] : known) {
      if (!numbers.contains(arena->number)) continue;
      tell(local_rank, {arena->number, nothing->payload_bytes()}, nothing->fd());
    }
  }
  MutexLock lock(mutex_);
  for (const auto& arena : idle) {
    for (auto& [local_rank, numbers] : known_) numbers.erase(arena->number);
    spare_.push_back(arena->number);
  }
}

bool Arenas::IsNewTo(uint32_t local_rank, const ResultArena& arena) {
  MutexLock lock(mutex_);
  return known_[local_rank].insert(arena.number).second;
}

}  // namespace thalweg
