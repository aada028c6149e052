#include "server/sidecar/bucket/in_order.h"

#include <utility>

namespace thalweg {

absl::Status InOrder::Do(uint32_t number, Action action) {
  {
    MutexLock lock(mutex_);
    if (is_doing_ || number != next_) {
      waiting_.emplace(number, std::move(action));
      return absl::OkStatus();
    }
    is_doing_ = true;
  }
  while (true) {
    if (const absl::Status status = action(); !status.ok()) return status;
    MutexLock lock(mutex_);
    const auto found = waiting_.find(++next_);
    is_doing_ = found != waiting_.end();
    if (!is_doing_) return absl::OkStatus();
    action = std::move(found->second);
    waiting_.erase(found);
  }
}

}  // namespace thalweg
