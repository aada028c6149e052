// DevicePath moves gradients from a device's memory to the sidecar, and results back. Only streams
// wait for the device.
#pragma once

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/core/session.h"
#include "core/base/clock.h"
#include "core/base/gradient_path.h"
#include "core/base/layout.h"
#include "core/device/device_runtime.h"
#include "core/ipc/bucket_arena.h"
#include "core/ipc/device_memory.h"

namespace thalweg {

// A DevicePath is thread-safe for one round of a lane at a time. All calls come from threads of the
// device. Memory that a stream may still use is never freed: neither when an error leaves copies
// half queued, nor by Close.
class DevicePath {
 public:
  // A Lane is a bucket's state on the path. It is freed when neither its owner nor a copy uses it.
  class Lane {
   public:
    virtual ~Lane() = default;
    // Returns what the sidecar needs beside the arenas.
    virtual DeviceMemory memory() const { return {}; }
  };

  virtual ~DevicePath() = default;

  virtual GradientPath path() const = 0;
  // Returns whether gradients and results lie in the arenas; otherwise each side opens memory of
  // the other's, which its owner must not free before.
  virtual bool UsesArenas() const = 0;

  // Opens a lane for gradients of `bytes`. The copies that use `input` share its ownership.
  virtual absl::StatusOr<std::shared_ptr<Lane>> OpenLane(std::shared_ptr<BucketArena> input,
                                                         uint64_t bytes) = 0;
  // Takes the sidecar's answer; called once, before the lane's first Fetch.
  virtual absl::Status SetResult(Lane& lane, const DeviceMemory& memory) = 0;

  // Closes what SetResult has opened. Nothing may be queued.
  virtual void CloseResult(Lane& lane) = 0;

  // Queues the copy of a gradient of `plan` elements to where the sidecar reads it. After an error
  // the path must only be closed.
  virtual absl::Status Send(const std::shared_ptr<Lane>& lane, const DeviceGradient& gradient,
                            const ChunkPlan& plan) = 0;
  // Queues the copy of a round's result to the gradient's memory. Returns an event of the lane that
  // is reached when the result is there; it must be waited for before the lane's next Send.
  //
  // The result must not be overwritten before this copy is done, although that next Send may have
  // begun. It is not: the sidecar writes a chunk of the result only when all workers have submitted
  // that chunk of the next round, and Send does not start to submit before this copy is done.
  virtual absl::StatusOr<DeviceEvent> Fetch(const std::shared_ptr<Lane>& lane,
                                            std::shared_ptr<const BucketArena> result,
                                            const DeviceGradient& gradient) = 0;

  // Returns the error that the device has met, if any.
  virtual absl::Status Check() const = 0;
  // Lets nothing new begin, waits for what is queued and releases the streams. Returns false when
  // the device has failed or took too long; what its streams may still use is then kept until the
  // process ends. Further calls return the first call's outcome. Destroying a path closes it
  // without waiting.
  virtual bool Close(TimePoint deadline) = 0;
};

}  // namespace thalweg
