// CudaDevice handles gradients in the memory of the node's GPUs, which workers share with the
// sidecar (CUDA IPC).
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "core/base/mutex.h"
#include "core/device/device_group.h"
#include "core/device/device_runtime.h"
#include "server/sidecar/device/device.h"

namespace thalweg {

class CudaDevice final : public Device {
 public:
  using MakeGroup = std::function<absl::StatusOr<std::shared_ptr<DeviceGroup>>(
      const std::vector<std::shared_ptr<DeviceRuntime>>&)>;

  // `gpus` are those that this process sees. `make_group` is called when workers of a node use more
  // than one.
  CudaDevice(std::vector<std::shared_ptr<DeviceRuntime>> gpus, MakeGroup make_group)
      : gpus_(std::move(gpus)), make_group_(std::move(make_group)) {}

  absl::Status Probe(const DeviceMemory& probe) override;
  // The workers' memory may be on any of the GPUs.
  absl::StatusOr<std::unique_ptr<BucketMemory>> MakeMemory(const MemoryTerms& terms) override;

  // Returns the GPU with that UUID. NotFound: this process does not see it.
  absl::StatusOr<std::shared_ptr<DeviceRuntime>> Find(const std::string& uuid) const;
  // Returns the job's group for collectives among these GPUs, in this order. A group that has
  // failed is replaced. No two jobs share one: what is queued behind work that does not begin waits
  // for it.
  absl::StatusOr<std::shared_ptr<DeviceGroup>> GroupOf(
      const std::string& job, const std::vector<std::shared_ptr<DeviceRuntime>>& gpus);

 private:
  const std::vector<std::shared_ptr<DeviceRuntime>> gpus_;
  const MakeGroup make_group_;
  Mutex mutex_;
  // By job and the members' UUIDs; the buckets that use them own them.
  std::map<std::pair<std::string, std::string>, std::weak_ptr<DeviceGroup>> groups_
      ABSL_GUARDED_BY(mutex_);
};

}  // namespace thalweg
