// What Thalweg needs of a device with memory of its own (a GPU): streams, events, copies, and
// memory that processes share. CUDA's runtime behind an interface, so that all that has logic can
// be tested on a fake.
//
// The calls mean what CUDA's mean: work is queued on streams, each of which does its work in order;
// nothing waits for a stream but a stream, so there is deliberately no call that makes the host
// wait. An error that the device meets in queued work is returned by every later call.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace thalweg {

// cudaStream_t and cudaEvent_t under other names. A stream of nullptr is the device's default one.
using DeviceStream = struct DeviceStreamTag*;
using DeviceEvent = struct DeviceEventTag*;

// Memory that another process shall open is shared in whole pieces of this size: with a smaller
// allocation the driver would share whatever lies beside it.
inline constexpr size_t kSharedMemoryGranule = 2 << 20;

// One device. Thread-safe. Every call must come from a thread on which this device is the current
// one: BindThread makes it so on threads of ours; elsewhere the caller, or its framework, does.
// Error messages name the call and the device's own name for the error.
class DeviceRuntime {
 public:
  enum class Access { kReadWrite, kReadOnly };

  virtual ~DeviceRuntime() = default;

  // 16 bytes, the same for a device in all processes of a machine and for no other device.
  virtual std::string uuid() const = 0;
  // Its number in this process, from 0.
  virtual int number() const = 0;

  // Makes the device the calling thread's current one, and its calls independent of whether another
  // thread is capturing a graph. For threads of ours only.
  virtual absl::Status BindThread() = 0;

  // Streams that do not wait for the default stream. What is queued on a stream that is destroyed
  // is still done.
  virtual absl::StatusOr<DeviceStream> CreateStream() = 0;
  virtual void DestroyStream(DeviceStream stream) = 0;
  virtual absl::StatusOr<DeviceEvent> CreateEvent() = 0;
  virtual void DestroyEvent(DeviceEvent event) = 0;

  // The event is reached when the stream has done everything that was queued on it before.
  virtual absl::Status Record(DeviceEvent event, DeviceStream stream) = 0;
  // What is queued on `stream` later begins when the event, as recorded last, is reached.
  virtual absl::Status Wait(DeviceStream stream, DeviceEvent event) = 0;

  // Memory of the device, at a multiple of 256 bytes. ResourceExhausted: it has not so much left.
  virtual absl::StatusOr<void*> AllocateMemory(size_t bytes) = 0;
  // Nothing that is queued may use it. May wait for the device.
  virtual void FreeMemory(void* memory) = 0;
  // Registered host memory of whole pages.
  virtual absl::StatusOr<void*> AllocateHost(size_t bytes) = 0;
  virtual void FreeHost(void* memory) = 0;

  // What another process needs to use memory that AllocateMemory has returned. Unimplemented: the
  // device or the system cannot do that.
  virtual absl::StatusOr<std::string> ShareMemory(void* memory) = 0;
  // The memory that another process has shared, for as long as that lives or does not free it.
  // InvalidArgument: that is not what ShareMemory returns.
  virtual absl::StatusOr<void*> OpenMemory(const std::string& shared) = 0;
  virtual void CloseMemory(void* memory) = 0;
  // An event that another process can open. Both may record it and wait for it.
  virtual absl::StatusOr<DeviceEvent> CreateSharedEvent() = 0;
  virtual absl::StatusOr<std::string> ShareEvent(DeviceEvent event) = 0;
  virtual absl::StatusOr<DeviceEvent> OpenEvent(const std::string& shared) = 0;

  // Both in the device's memory, not overlapping.
  virtual absl::Status Copy(void* to, const void* from, size_t bytes, DeviceStream stream) = 0;
  // Host memory that is not registered is copied, too, but the caller may have to wait for it.
  virtual absl::Status CopyToHost(void* host, const void* device, size_t bytes,
                                  DeviceStream stream) = 0;
  virtual absl::Status CopyToDevice(void* device, const void* host, size_t bytes,
                                    DeviceStream stream) = 0;

  // Has `function(argument)` called, on a thread of the runtime, when the stream gets there; never,
  // if the device has failed. It must not call the runtime, nor wait for somebody who does.
  virtual absl::Status Launch(DeviceStream stream, void (*function)(void*), void* argument) = 0;

  // Locks host memory, whole pages that this process has mapped with `access`, so that copies go
  // there directly. Unimplemented: the device cannot do that with read-only memory.
  virtual absl::Status RegisterHost(const void* begin, size_t bytes, Access access) = 0;
  virtual void UnregisterHost(const void* begin) = 0;

  // OK, or the error that the device has met in queued work. Does not wait.
  virtual absl::Status Check(DeviceStream stream) = 0;
};

// How many CUDA devices this process sees; 0 without a driver, or in a build without CUDA.
int CountCudaDevices();

// The CUDA device of that number. Unavailable: there is no such device or no driver; Unimplemented:
// this build has no CUDA. Needs neither until it is called.
absl::StatusOr<std::shared_ptr<DeviceRuntime>> OpenCudaDevice(int number);

}  // namespace thalweg
