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

absl::Status MemoryBudget::Move(uint64_t before, uint64_t after) {
  MutexLock lock(mutex_);
  const uint64_t others = reserved_ - before;
  if (after > before && after > limit_ - others) {
    return absl::ResourceExhaustedError(absl::StrCat("needs ", after, " bytes of memory, but ",
                                                     limit_ - others, " of the limit of ", limit_,
                                                     " are free for it"));
  }
  reserved_ = others + after;
  gauge_.Add(static_cast<double>(after) - static_cast<double>(before));
  return absl::OkStatus();
}

}  // namespace thalweg
