// Copies that are queued on a device's streams, with what they use: nothing of it is freed before
// they are done.
#pragma once

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/clock.h"
#include "core/base/mutex.h"
#include "core/device/device_runtime.h"

namespace thalweg {

// Thread-safe. Must outlive the copies: when Close returns false it has to be left behind, with
// everything that the streams know of.
class CopiesInFlight {
 public:
  // What a function on a stream gets.
  struct Copy;
  using Uses = std::vector<std::shared_ptr<const void>>;

  CopiesInFlight();
  ~CopiesInFlight();

  // Of a copy that is about to be queued. Cancelled: closed.
  absl::StatusOr<Copy*> Begin(Uses uses);
  // For DeviceRuntime::Launch, behind the copy: it is done.
  static void Finish(void* copy);
  // A copy could not be queued whole, and will not be done.
  void Break();
  // Frees what was used by copies that are done, which functions on streams must not.
  void Reap();

  // Lets none begin any more and waits until all are done. False when the device failed, a copy is
  // broken, or `deadline` has come.
  bool Close(DeviceRuntime& device, DeviceStream stream, TimePoint deadline);

 private:
  Mutex mutex_;  // never held during a call of the device
  CondVar changed_;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  bool broken_ ABSL_GUARDED_BY(mutex_) = false;
  std::map<Copy*, std::unique_ptr<Copy>> in_flight_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<Copy>> finished_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace thalweg
