#include "server/sidecar/cuda/stream_progress.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"

namespace thalweg {
namespace {

// A waiting thread checks at this interval whether the GPU still works.
constexpr Duration kLookAtStream = std::chrono::milliseconds(50);

}  // namespace

void StreamProgress::Reset() {
  MutexLock lock(mutex_);
  count_ = 0;
}

absl::Status StreamProgress::Mark(DeviceRuntime& gpu, DeviceStream stream, uint32_t count) {
  marks_[count] = {this, count};
  return gpu.Launch(stream, &Reach, &marks_[count]);
}

void StreamProgress::Reach(void* place) {
  const Place& reached = *static_cast<const Place*>(place);
  MutexLock lock(reached.progress->mutex_);
  reached.progress->count_ = std::max(reached.progress->count_, reached.count);
  reached.progress->changed_.NotifyAll();
}

uint32_t StreamProgress::Wait(uint32_t count, TimePoint deadline) const {
  MutexLock lock(mutex_);
  changed_.WaitUntil(mutex_, deadline,
                     [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return count_ >= count; });
  return count_;
}

absl::Status StreamProgress::WaitFor(DeviceRuntime& gpu, DeviceStream stream, DeviceGroup* group,
                                     uint32_t count, Duration patience) const {
  const TimePoint deadline = Now() + patience;
  while (Wait(count, std::min(deadline, Now() + kLookAtStream)) < count) {
    THALWEG_RETURN_IF_ERROR(gpu.Check(stream));
    if (group != nullptr) THALWEG_RETURN_IF_ERROR(group->Check());
    if (Now() >= deadline) {
      return absl::DeadlineExceededError(
          absl::StrCat("the GPU did not finish its work within ", ToSeconds(patience), " s"));
    }
  }
  return absl::OkStatus();
}

}  // namespace thalweg
