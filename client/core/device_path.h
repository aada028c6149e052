// How gradients in a device's memory get to the sidecar, and the results back. Nothing waits for
// the device but streams.
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

// Thread-safe, for one round of a lane at a time. All calls on threads of the device. What a stream
// may still use is never freed: not when an error leaves copies half queued, and not by Close.
class DevicePath {
 public:
  // What a bucket has there. Freed when neither its owner nor a copy uses it.
  class Lane {
   public:
    virtual ~Lane() = default;
    // What the sidecar needs beside the arenas.
    virtual DeviceMemory memory() const { return {}; }
  };

  virtual ~DevicePath() = default;

  virtual GradientPath path() const = 0;
  // Whether gradients and results lie in the arenas; else each side opens memory of the other's,
  // which its owner must not free before.
  virtual bool UsesArenas() const = 0;

  // For gradients of `bytes`. `input` is shared with the copies that use it.
  virtual absl::StatusOr<std::shared_ptr<Lane>> OpenLane(std::shared_ptr<BucketArena> input,
                                                         uint64_t bytes) = 0;
  // What the sidecar has answered. Once, before the lane's first Fetch.
  virtual absl::Status SetResult(Lane& lane, const DeviceMemory& memory) = 0;

  // Gives up what SetResult has opened. Nothing is queued.
  virtual void CloseResult(Lane& lane) = 0;

  // Queues the copy of a gradient of `plan` elements to where the sidecar finds it. After an error
  // the path must only be closed.
  virtual absl::Status Send(const std::shared_ptr<Lane>& lane, const DeviceGradient& gradient,
                            const ChunkPlan& plan) = 0;
  // Queues the copy of a round's result to the gradient's memory. The event is the lane's, reached
  // when the result is there; it must be waited for before the lane's next Send.
  //
  // When that next Send may have begun, the result may not be overwritten yet; but it is not: the
  // sidecar writes a chunk of it when all workers have handed over that chunk of the next round,
  // and Send does not begin to before this copy is done.
  virtual absl::StatusOr<DeviceEvent> Fetch(const std::shared_ptr<Lane>& lane,
                                            std::shared_ptr<const BucketArena> result,
                                            const DeviceGradient& gradient) = 0;

  // The error that the device has met, if any.
  virtual absl::Status Check() const = 0;
  // Lets nothing new begin, waits for what is queued and gives up the streams. False: the device
  // has failed or took too long, and what its streams may still use is left behind until the
  // process ends. Once closed, further calls only say how that ended. Destroying a path closes it
  // without waiting.
  virtual bool Close(TimePoint deadline) = 0;
};

}  // namespace thalweg
