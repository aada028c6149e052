// IpcPath moves gradients in a device's memory to a sidecar that works on the same device, through
// memory that both have open.
//
//   producer's stream  ─event─▶ out: wait, copy, event ─▶ the sidecar's stream
//   (the round completes)       in:  wait for the sidecar's event, copy the result, event
//                                    ─▶ consumers' streams
#pragma once

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/core/device_path.h"

namespace thalweg {

class IpcPath final : public DevicePath {
 public:
  // Returns Unimplemented, or the device's error, when the device cannot share memory.
  static absl::StatusOr<std::unique_ptr<IpcPath>> Create(std::shared_ptr<DeviceRuntime> device);
  ~IpcPath() override;

  // Returns memory that holds kDeviceProbe, with which the sidecar tries to share.
  const DeviceMemory& probe() const;

  GradientPath path() const override { return GradientPath::kIpc; }
  bool UsesArenas() const override { return false; }
  // Allocates `bytes`: sharing the framework's own memory would also share the memory next to it.
  absl::StatusOr<std::shared_ptr<Lane>> OpenLane(std::shared_ptr<BucketArena> input,
                                                 uint64_t bytes) override;
  absl::Status SetResult(Lane& lane, const DeviceMemory& memory) override;
  void CloseResult(Lane& lane) override;
  absl::Status Send(const std::shared_ptr<Lane>& lane, const DeviceGradient& gradient,
                    const ChunkPlan& plan) override;
  absl::StatusOr<DeviceEvent> Fetch(const std::shared_ptr<Lane>& lane,
                                    std::shared_ptr<const BucketArena> result,
                                    const DeviceGradient& gradient) override;
  absl::Status Check() const override;
  bool Close(TimePoint deadline) override;

 private:
  struct Shared;
  explicit IpcPath(std::unique_ptr<Shared> shared);

  std::unique_ptr<Shared> shared_;
};

}  // namespace thalweg
