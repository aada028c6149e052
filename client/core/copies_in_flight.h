// CopiesInFlight tracks copies that are queued on a device's streams, and keeps alive what they use
// until they are done.
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

// It is thread-safe and must outlive the copies: when Close returns false it must be left behind,
// with everything that the streams use.
class CopiesInFlight {
 public:
  // A Copy is the argument of a function on a stream.
  struct Copy;
  using Uses = std::vector<std::shared_ptr<const void>>;

  CopiesInFlight();
  ~CopiesInFlight();

  // Registers a copy that is about to be queued. Cancelled: Close has been called.
  absl::StatusOr<Copy*> Begin(Uses uses);
  // Marks the copy as done; for DeviceRuntime::Launch, queued after the copy.
  static void Finish(void* copy);
  // Records that a copy could not be queued completely and will never be done.
  void Break();
  // Frees what finished copies used. Functions on streams must not do this.
  void Reap();

  // Lets no copy begin any more and waits until all are done. Returns false when the device failed,
  // a copy is broken, or `deadline` has come.
  bool Close(DeviceRuntime& device, DeviceStream stream, TimePoint deadline);

 private:
  Mutex mutex_;  // never held while a device call runs
  CondVar changed_;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  bool broken_ ABSL_GUARDED_BY(mutex_) = false;
  std::map<Copy*, std::unique_ptr<Copy>> in_flight_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<Copy>> finished_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace thalweg
