#include "server/sidecar/cuda/cuda_device.h"

#include <cstring>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "server/sidecar/cuda/cuda_memory.h"

namespace thalweg {
namespace {

// A copy of a few bytes may take this long.
constexpr Duration kProbePatience = std::chrono::seconds(5);

}  // namespace

absl::Status CudaDevice::Probe(const DeviceMemory& probe) {
  THALWEG_ASSIGN_OR_RETURN(const auto runtime, Find(probe.uuid));
  THALWEG_ASSIGN_OR_RETURN(const auto lane, GpuLane::Create(runtime, kProbePatience));
  if (GpuLane::IsBlocked(*runtime)) {
    return absl::UnavailableError(
        "work of an earlier job does not end on this GPU, as when a worker was killed before its "
        "gradient was there: restart the sidecar once its jobs are over");
  }
  THALWEG_ASSIGN_OR_RETURN(const GpuLane::Shared shared, lane->Open(probe));
  THALWEG_ASSIGN_OR_RETURN(std::byte* const host, lane->AllocateHost(sizeof(kDeviceProbe)));
  StreamProgress& progress = lane->MakeProgress(1);
  THALWEG_RETURN_IF_ERROR(runtime->Wait(lane->stream(), shared.event));
  THALWEG_RETURN_IF_ERROR(
      runtime->CopyToHost(host, shared.memory, sizeof(kDeviceProbe), lane->stream()));
  THALWEG_RETURN_IF_ERROR(progress.Mark(*runtime, lane->stream(), 1));
  THALWEG_RETURN_IF_ERROR(lane->WaitFor(progress, 1));
  if (std::memcmp(host, kDeviceProbe, sizeof(kDeviceProbe)) != 0) {
    return absl::DataLossError("what the worker has put into shared memory is not there");
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<BucketMemory>> CudaDevice::MakeMemory(const MemoryTerms& terms) {
  return CudaMemory::Create(*this, terms);
}

absl::StatusOr<std::shared_ptr<DeviceRuntime>> CudaDevice::Find(const std::string& uuid) const {
  for (const auto& gpu : gpus_) {
    if (gpu->uuid() == uuid) return gpu;
  }
  return absl::NotFoundError(absl::StrCat("the sidecar does not see GPU ",
                                          absl::BytesToHexString(uuid), "; it sees ", gpus_.size(),
                                          " (NVIDIA_VISIBLE_DEVICES of its container)"));
}

absl::StatusOr<std::shared_ptr<DeviceGroup>> CudaDevice::GroupOf(
    const std::vector<std::shared_ptr<DeviceRuntime>>& gpus) {
  std::string key;
  for (const auto& gpu : gpus) key += gpu->uuid();
  MutexLock lock(mutex_);
  std::shared_ptr<DeviceGroup>& group = groups_[key];
  if (group == nullptr || !group->Check().ok()) {
    THALWEG_ASSIGN_OR_RETURN(group, make_group_(gpus));
  }
  return group;
}

}  // namespace thalweg
