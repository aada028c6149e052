// How far a stream has come, for threads of the host.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "core/base/clock.h"
#include "core/base/mutex.h"
#include "core/device/device_group.h"
#include "core/device/device_runtime.h"

namespace thalweg {

// Thread-safe. Must outlive what it has queued.
class StreamProgress {
 public:
  explicit StreamProgress(uint32_t most) : marks_(most + 1) {}
  StreamProgress(const StreamProgress&) = delete;
  StreamProgress& operator=(const StreamProgress&) = delete;

  // Nothing is queued; counts from 0 again.
  void Reset();
  // Queues: the count is `count`, at most `most`. Each count once between Resets, and rising.
  absl::Status Mark(DeviceRuntime& gpu, DeviceStream stream, uint32_t count);
  // Waits until the count is at least `count`, or until `deadline`. Returns the count.
  uint32_t Wait(uint32_t count, TimePoint deadline) const;
  // The same, as long as that may take, up to `patience`: an error of the GPU ends it, too, or one
  // of its group, unless that is null.
  absl::Status WaitFor(DeviceRuntime& gpu, DeviceStream stream, DeviceGroup* group, uint32_t count,
                       Duration patience) const;

 private:
  struct Place {
    StreamProgress* progress = nullptr;
    uint32_t count = 0;
  };
  static void Reach(void* place);

  std::vector<Place> marks_;  // by count; what functions on streams get
  mutable Mutex mutex_;
  mutable CondVar changed_;
  uint32_t count_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace thalweg
