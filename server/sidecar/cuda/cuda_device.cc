#include "server/sidecar/cuda/cuda_device.h"

#include <cstring>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "kernels/reduce/reduce_cuda.h"
#include "server/sidecar/cuda/cuda_memory.h"

namespace thalweg {
namespace {

// A copy of a few bytes may take this long.
constexpr Duration kProbePatience = std::chrono::seconds(5);
// A kernel's result takes so much of the memory, before the number of its non-finite elements.
constexpr size_t kFolded = 256;

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
  THALWEG_ASSIGN_OR_RETURN(std::byte* const folded, lane->Allocate(kFolded + sizeof(uint64_t)));
  StreamProgress& progress = lane->MakeProgress(1);
  THALWEG_RETURN_IF_ERROR(runtime->Wait(lane->stream(), shared.event));
  // The GPU may be one for which there are no kernels.
  const void* const share = shared.memory;
  const float weight = 1;
  THALWEG_RETURN_IF_ERROR(FoldMeanOnDevice(lane->kernel_stream(), {&share, 1}, {&weight, 1}, 1,
                                           DType::kFloat32, DType::kFloat32, folded, 1,
                                           reinterpret_cast<uint64_t*>(folded + kFolded)));
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
    const std::string& job, const std::vector<std::shared_ptr<DeviceRuntime>>& gpus) {
  std::string uuids;
  for (const auto& gpu : gpus) uuids += gpu->uuid();
  MutexLock lock(mutex_);
  std::erase_if(groups_, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<DeviceGroup>& known = groups_[{job, uuids}];
  std::shared_ptr<DeviceGroup> group = known.lock();
  if (group == nullptr || !group->Check().ok()) {
    THALWEG_ASSIGN_OR_RETURN(group, make_group_(gpus));
    known = group;
  }
  return group;
}

}  // namespace thalweg
