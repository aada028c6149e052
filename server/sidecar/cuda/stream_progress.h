// StreamProgress tells threads of the host how far a stream has come.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "core/base/clock.h"
#include "core/base/mutex.h"
#include "core/device/device_group.h"
#include "core/device/device_runtime.h"

namespace thalweg {

// It is thread-safe and must outlive what it has queued.
class StreamProgress {
 public:
  explicit StreamProgress(uint32_t most) : marks_(most + 1) {}
  StreamProgress(const StreamProgress&) = delete;
  StreamProgress& operator=(const StreamProgress&) = delete;

  // Restarts the count at 0; nothing may be queued.
  void Reset();
  // Queues the setting of the count to `count`, at most `most`. Between Resets counts rise and do
  // not repeat.
  absl::Status Mark(DeviceRuntime& gpu, DeviceStream stream, uint32_t count);
  // Waits until the count is at least `count`, or until `deadline`. Returns the count.
  uint32_t Wait(uint32_t count, TimePoint deadline) const;
  // Waits up to `patience`: an error of the GPU or of its group, unless that is null, also ends the
  // wait.
  absl::Status WaitFor(DeviceRuntime& gpu, DeviceStream stream, DeviceGroup* group, uint32_t count,
                       Duration patience) const;

 private:
  struct Place {
    StreamProgress* progress = nullptr;
    uint32_t count = 0;
  };
  static void Reach(void* place);

  std::vector<Place> marks_;  // by count; arguments of functions on streams
  mutable Mutex mutex_;
  mutable CondVar changed_;
  uint32_t count_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace thalweg
