// GpuLane is what one bucket has on one GPU: a stream on which all its work is done in order, and
// memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/clock.h"
#include "core/device/device_group.h"
#include "core/device/device_runtime.h"
#include "core/ipc/device_memory.h"
#include "kernels/launch/stream.h"
#include "server/sidecar/cuda/stream_progress.h"

namespace thalweg {

// A GpuLane is thread-safe. What it hands out lives as long as the lane and everything that has
// been queued on its stream. If that does not end, it is left behind, with all lanes of that GPU
// that end later, until the creation or destruction of another lane finds them idle.
class GpuLane {
 public:
  // `patience` limits how long the GPU may take for what is queued, once it can begin.
  static absl::StatusOr<std::unique_ptr<GpuLane>> Create(std::shared_ptr<DeviceRuntime> gpu,
                                                         Duration patience);
  ~GpuLane();

  DeviceRuntime& gpu() const;
  DeviceStream stream() const;
  CudaStream kernel_stream() const;
  // Makes the GPU the calling thread's current one, as every other call here requires.
  absl::Status Bind() const { return gpu().BindThread(); }

  absl::StatusOr<std::byte*> Allocate(uint64_t bytes);
  absl::StatusOr<std::byte*> AllocateHost(uint64_t bytes);
  // Makes a progress counter for the lane's stream; `most` is the greatest count.
  StreamProgress& MakeProgress(uint32_t most);
  // With a group, its errors are errors of the wait, and the wait's errors become the group's:
  // another GPU could wait for what is queued here.
  absl::Status WaitFor(const StreamProgress& progress, uint32_t count) const;
  // From now on operations of that group are queued on the stream. The group is aborted with the
  // lane if it has met an error by then, or if the stream does not end.
  void Join(std::shared_ptr<DeviceGroup> group);

  // A Shared is memory and its event, for other processes. The caller records the event.
  struct Shared {
    std::byte* memory = nullptr;
    DeviceEvent event = nullptr;
    DeviceMemory handles;  // for other processes; empty in what Open returns
  };
  absl::StatusOr<Shared> AllocateShared(uint64_t bytes);
  // Opens those of another process. InvalidArgument: they belong to another GPU, or there is no
  // such memory.
  absl::StatusOr<Shared> Open(const DeviceMemory& handles);
  // Closes what Open has returned, once; no queued work may use it. Does nothing on a blocked GPU.
  void Close(const Shared& opened);
  // Waits for everything that has been queued. Unavailable: the GPU is blocked by another lane, and
  // this one, which is not idle yet, has not been waited for.
  absl::Status WaitUntilIdle();
  // Returns whether some lane's work on the GPU has not ended in time, also if the lane is gone.
  // Until that is idle, nothing there is freed.
  static bool IsBlocked(const DeviceRuntime& gpu);

 private:
  struct Holdings;
  struct LeftBehind;
  static void SweepLeftBehind();
  absl::Status WaitFor(const StreamProgress& progress, uint32_t count, Duration patience) const;
  std::shared_ptr<DeviceGroup> group() const;
  explicit GpuLane(std::unique_ptr<Holdings> holdings);

  std::unique_ptr<Holdings> holdings_;
};

}  // namespace thalweg
