// PinnedPath moves gradients in a device's memory through a session's arenas. The arenas are
// registered with the device, so that each gradient crosses the bus once in each direction, and no
// thread of the host waits for it.
//
//   producer's stream  ─event─▶ out:    wait, copy piece 0, event, copy piece 1, event, …
//                               notify: wait, ready = …; wait, ready = …        (the sidecar sees)
//   (the round completes)       in:     copy the result, event ─▶ consumers' streams
//
// `notify` is a separate stream so that copies do not wait for the host's notifications; `in` is
// one so that both directions of the bus are in use at once.
#pragma once

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/core/device_path.h"

namespace thalweg {

class PinnedPath final : public DevicePath {
 public:
  static absl::StatusOr<std::unique_ptr<PinnedPath>> Create(std::shared_ptr<DeviceRuntime> device);
  ~PinnedPath() override;

  // Returns kPinned; or kPageable when the device cannot lock memory that is mapped read-only: then
  // the copies of results make Fetch wait.
  GradientPath path() const override;
  bool UsesArenas() const override { return true; }
  absl::StatusOr<std::shared_ptr<Lane>> OpenLane(std::shared_ptr<BucketArena> input,
                                                 uint64_t bytes) override;
  absl::Status SetResult(Lane& lane, const DeviceMemory& memory) override;
  void CloseResult(Lane& /*lane*/) override {}
  // Advances the input arena's ready counter after each copied piece.
  absl::Status Send(const std::shared_ptr<Lane>& lane, const DeviceGradient& gradient,
                    const ChunkPlan& plan) override;
  absl::StatusOr<DeviceEvent> Fetch(const std::shared_ptr<Lane>& lane,
                                    std::shared_ptr<const BucketArena> result,
                                    const DeviceGradient& gradient) override;
  absl::Status Check() const override;
  bool Close(TimePoint deadline) override;

 private:
  struct Shared;
  explicit PinnedPath(std::unique_ptr<Shared> shared);
  // Keeps what a device's streams may still use until the process ends.
  static void LeaveBehind(std::unique_ptr<Shared> shared);

  std::unique_ptr<Shared> shared_;
};

}  // namespace thalweg
