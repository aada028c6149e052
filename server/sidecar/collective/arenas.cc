#include "server/sidecar/collective/arenas.h"

#include <algorithm>
#include <bit>

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
    number = ++made_;
  }
  THALWEG_ASSIGN_OR_RETURN(BucketArena arena, BucketArena::Create("thalweg-collected", size, true));
  return std::make_shared<ResultArena>(ResultArena{number, std::move(arena)});
}

void Arenas::Return(std::shared_ptr<ResultArena> arena) {
  MutexLock lock(mutex_);
  free_.push_back(std::move(arena));
}

bool Arenas::IsNewTo(uint32_t local_rank, const ResultArena& arena) {
  MutexLock lock(mutex_);
  return known_[local_rank].insert(arena.number).second;
}

}  // namespace thalweg
