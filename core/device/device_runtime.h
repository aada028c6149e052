// DeviceRuntime is what Thalweg needs of a device with memory of its own (a GPU): streams, events,
// copies, and memory that processes share. It is an interface to CUDA's runtime, so that all logic
// can be tested with a fake.
//
// The calls mean what CUDA's mean: work is queued on streams, and each stream runs its work in
// order. Only streams wait for streams; there is deliberately no call that makes the host wait. An
// error that the device meets in queued work is returned by every later call.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace thalweg {

// These are cudaStream_t and cudaEvent_t. A stream of nullptr is the device's default stream.
using DeviceStream = struct DeviceStreamTag*;
using DeviceEvent = struct DeviceEventTag*;

// Memory for another process is shared in whole pieces of this size: with a smaller allocation the
// driver would also share the memory next to it.
inline constexpr size_t kSharedMemoryGranule = 2 << 20;

// A DeviceRuntime is one device. It is thread-safe. Every call must come from a thread whose
// current device is this one: BindThread sets it on our threads; on other threads the caller or its
// framework does. Error messages name the call and the device's own name for the error.
class DeviceRuntime {
 public:
  enum class Access { kReadWrite, kReadOnly };

  virtual ~DeviceRuntime() = default;

  // Returns 16 bytes that are the same for a device in all processes of a machine and differ from
  // those of any other device.
  virtual std::string uuid() const = 0;
  // Returns the device's number in this process, from 0.
  virtual int number() const = 0;

  // Makes the device the calling thread's current one, and makes the thread's calls independent of
  // graph captures on other threads. For our own threads only.
  virtual absl::Status BindThread() = 0;

  // The streams do not wait for the default stream. Work queued on a destroyed stream is still
  // done.
  virtual absl::StatusOr<DeviceStream> CreateStream() = 0;
  virtual void DestroyStream(DeviceStream stream) = 0;
  virtual absl::StatusOr<DeviceEvent> CreateEvent() = 0;
  virtual void DestroyEvent(DeviceEvent event) = 0;

  // Records the event: it is reached when the stream has done everything that was queued on it
  // before.
  virtual absl::Status Record(DeviceEvent event, DeviceStream stream) = 0;
  // Makes later work on `stream` begin when the event, as recorded last, is reached.
  virtual absl::Status Wait(DeviceStream stream, DeviceEvent event) = 0;

  // Allocates memory of the device at a multiple of 256 bytes. ResourceExhausted: not enough is
  // left.
  virtual absl::StatusOr<void*> AllocateMemory(size_t bytes) = 0;
  // Frees the memory; queued work must not use it. The call may wait for the device.
  virtual void FreeMemory(void* memory) = 0;
  // Both handle registered host memory of whole pages.
  virtual absl::StatusOr<void*> AllocateHost(size_t bytes) = 0;
  virtual void FreeHost(void* memory) = 0;

  // Returns what another process needs to use memory that AllocateMemory has returned.
  // Unimplemented: the device or the system does not support it.
  virtual absl::StatusOr<std::string> ShareMemory(void* memory) = 0;
  // Opens memory that another process has shared; it is valid while that process lives and has not
  // freed it. InvalidArgument: `shared` does not come from ShareMemory.
  virtual absl::StatusOr<void*> OpenMemory(const std::string& shared) = 0;
  virtual void CloseMemory(void* memory) = 0;
  // The event can be opened by another process. Both may record it and wait for it.
  virtual absl::StatusOr<DeviceEvent> CreateSharedEvent() = 0;
  virtual absl::StatusOr<std::string> ShareEvent(DeviceEvent event) = 0;
  virtual absl::StatusOr<DeviceEvent> OpenEvent(const std::string& shared) = 0;

  // Copies within the device's memory; the ranges must not overlap.
  virtual absl::Status Copy(void* to, const void* from, size_t bytes, DeviceStream stream) = 0;
  // Both also accept host memory that is not registered, but the caller may then have to wait.
  virtual absl::Status CopyToHost(void* host, const void* device, size_t bytes,
                                  DeviceStream stream) = 0;
  virtual absl::Status CopyToDevice(void* device, const void* host, size_t bytes,
                                    DeviceStream stream) = 0;

  // Calls `function(argument)` on a thread of the runtime when the stream reaches it; never, if the
  // device has failed. The function must neither call the runtime nor wait for a thread that does.
  virtual absl::Status Launch(DeviceStream stream, void (*function)(void*), void* argument) = 0;

  // Locks host memory (whole pages that this process has mapped with `access`), so that copies
  // access it directly. Unimplemented: the device does not support read-only memory.
  virtual absl::Status RegisterHost(const void* begin, size_t bytes, Access access) = 0;
  virtual void UnregisterHost(const void* begin) = 0;

  // Returns OK, or the error that the device has met in queued work. Does not wait.
  virtual absl::Status Check(DeviceStream stream) = 0;
};

// Returns how many CUDA devices this process sees; 0 without a driver or in a build without CUDA.
int CountCudaDevices();

// Opens the CUDA device of that number. Unavailable: there is no such device or no driver;
// Unimplemented: this build has no CUDA. Neither is needed before this call.
absl::StatusOr<std::shared_ptr<DeviceRuntime>> OpenCudaDevice(int number);

}  // namespace thalweg
