#include "server/aggregator/memory_budget.h"

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"

namespace thalweg {

absl::Status MemoryBudget::Reservation::Resize(uint64_t bytes) {
  THALWEG_RETURN_IF_ERROR(budget_.Move(bytes_, bytes));
  bytes_ = bytes;
  return absl::OkStatus();
}

void MemoryBudget::Reservation::Release() { Resize(0).IgnoreError(); }  // shrinking never fails

uint64_t MemoryBudget::reserved() const {
  MutexLock lock(mutex_);
  return reserved_;
}

uint64_t MemoryBudget::limit() const {
  MutexLock lock(mutex_);
  return limit_;
}

void MemoryBudget::SetLimit(uint64_t limit) {
  MutexLock lock(mutex_);
  limit_ = limit;
}

absl::Status MemoryBudget::Move(uint64_t before, uint64_t after) {
  THALWEG_RETURN_IF_ERROR(MoveHere(before, after));
  if (whole_ == nullptr) return absl::OkStatus();
  const absl::Status moved = whole_->Move(before, after);
  if (!moved.ok()) MoveHere(after, before).IgnoreError();  // it shrinks, so it does not fail
  return moved;
}

absl::Status MemoryBudget::MoveHere(uint64_t before, uint64_t after) {
  MutexLock lock(mutex_);
  const uint64_t others = reserved_ - before;
  const uint64_t free = limit_ > others ? limit_ - others : 0;
  if (after > before && after > free) {
    return absl::ResourceExhaustedError(absl::StrCat("needs ", after, " bytes of memory, but ",
                                                     free, " of ", name_, " of ", limit_,
                                                     " are free for it"));
  }
  reserved_ = others + after;
  gauge_.Add(static_cast<double>(after) - static_cast<double>(before));
  return absl::OkStatus();
}

}  // namespace thalweg
