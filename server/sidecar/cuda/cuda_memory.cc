#include "server/sidecar/cuda/cuda_memory.h"

#include <algorithm>
#include <utility>

#include "core/base/status_macros.h"
#include "kernels/reduce/reduce_cuda.h"
#include "server/sidecar/cuda/cuda_blocks.h"
#include "server/sidecar/cuda/cuda_cast.h"
#include "server/sidecar/cuda/cuda_device.h"
#include "server/sidecar/cuda/cuda_power_sgd.h"
#include "server/sidecar/cuda/cuda_topk.h"

namespace thalweg {

absl::StatusOr<std::unique_ptr<CudaMemory>> CudaMemory::Create(CudaDevice& device,
                                                               const MemoryTerms& terms) {
  THALWEG_ASSIGN_OR_RETURN(BucketArena progress, BucketArena::Create("thalweg-progress", 0, true));
  return std::unique_ptr<CudaMemory>(new CudaMemory(device, terms, std::move(progress)));
}

CudaMemory::CudaMemory(CudaDevice& device, const MemoryTerms& terms, BucketArena progress)
    : device_(device), terms_(terms), progress_(std::move(progress)), inputs_(terms.local_size) {}

absl::StatusOr<CudaMemory::OnGpu*> CudaMemory::UseGpu(const std::string& uuid) {
  for (const auto& on_gpu : gpus_) {
    if (on_gpu->lane->gpu().uuid() == uuid) return on_gpu.get();
  }
  THALWEG_ASSIGN_OR_RETURN(const auto runtime, device_.Find(uuid));
  auto on_gpu = std::make_unique<OnGpu>();
  THALWEG_ASSIGN_OR_RETURN(on_gpu->lane, GpuLane::Create(runtime, terms_.patience));
  THALWEG_ASSIGN_OR_RETURN(on_gpu->arrivals, GpuLane::Create(runtime, terms_.patience));
  const uint64_t bytes = terms_.layout.Elems() * SizeOf(terms_.layout.dtype);
  THALWEG_ASSIGN_OR_RETURN(on_gpu->result, on_gpu->lane->AllocateShared(bytes));
  gpus_.push_back(std::move(on_gpu));
  return gpus_.back().get();
}

absl::Status CudaMemory::AddInput(uint32_t local_rank, UniqueFd /*fd*/,
                                  const DeviceMemory& memory) {
  THALWEG_ASSIGN_OR_RETURN(OnGpu* const gpu, UseGpu(memory.uuid));
  THALWEG_RETURN_IF_ERROR(gpu->lane->Bind());
  Input input{gpu, {}, &gpu->arrivals->MakeProgress(1)};
  THALWEG_ASSIGN_OR_RETURN(input.share, gpu->lane->Open(memory));
  inputs_[local_rank] = input;
  return absl::OkStatus();
}

void CudaMemory::DropInput(uint32_t local_rank) {
  if (!inputs_[local_rank].has_value() || inputs_[local_rank]->is_dropped) return;
  const OnGpu& on_gpu = *inputs_[local_rank]->gpu;
  if (!on_gpu.lane->Bind().ok() || !on_gpu.lane->WaitUntilIdle().ok()) return;
  on_gpu.lane->Close(inputs_[local_rank]->share);
  inputs_[local_rank]->is_dropped = true;
}

DeviceMemory CudaMemory::ResultFor(uint32_t local_rank) const {
  return inputs_[local_rank]->gpu->result.handles;
}

uint32_t CudaMemory::WaitInput(uint32_t local_rank, uint32_t chunks, TimePoint deadline) const {
  return inputs_[local_rank]->arrived->Wait(1, deadline) == 0 ? 0 : chunks;
}

absl::Status CudaMemory::Check() const {
  for (const auto& on_gpu : gpus_) {
    THALWEG_RETURN_IF_ERROR(on_gpu->arrivals->Bind());
    THALWEG_RETURN_IF_ERROR(on_gpu->arrivals->gpu().Check(on_gpu->arrivals->stream()));
  }
  return absl::OkStatus();
}

std::vector<const void*> CudaMemory::Shares(uint64_t begin) const {
  const uint64_t offset = begin * SizeOf(terms_.share);
  if (gpus_.size() > 1) return {gpus_[home_]->sum + offset};
  std::vector<const void*> shares;
  for (const auto& input : inputs_) shares.push_back(input->share.memory + offset);
  return shares;
}

absl::Status CudaMemory::BeginRound() {
  progress_.ResetReady();
  THALWEG_RETURN_IF_ERROR(ExpectShares());
  return gpus_.size() > 1 ? SumAtHome() : absl::OkStatus();
}

absl::Status CudaMemory::ExpectShares() {
  for (const auto& input : inputs_) {
    const OnGpu& on_gpu = *input->gpu;
    DeviceRuntime& gpu = on_gpu.lane->gpu();
    const DeviceStream arrivals = on_gpu.arrivals->stream();
    THALWEG_RETURN_IF_ERROR(on_gpu.lane->Bind());
    THALWEG_RETURN_IF_ERROR(gpu.Wait(on_gpu.lane->stream(), input->share.event));
    THALWEG_RETURN_IF_ERROR(gpu.Wait(arrivals, input->share.event));
    input->arrived->Reset();
    THALWEG_RETURN_IF_ERROR(input->arrived->Mark(gpu, arrivals, 1));
  }
  return absl::OkStatus();
}

absl::Status CudaMemory::FormGroup() {
  // The order is independent of arrival, so that all buckets use one group and sums do not change.
  std::sort(gpus_.begin(), gpus_.end(), [](const auto& a, const auto& b) {
    return a->lane->gpu().number() < b->lane->gpu().number();
  });
  const uint64_t bytes = terms_.layout.Elems() * SizeOf(terms_.share);
  std::vector<std::shared_ptr<DeviceRuntime>> runtimes;
  for (const auto& on_gpu : gpus_) {
    GpuLane& lane = *on_gpu->lane;
    THALWEG_RETURN_IF_ERROR(lane.Bind());
    THALWEG_ASSIGN_OR_RETURN(on_gpu->sum, lane.Allocate(bytes));
    THALWEG_ASSIGN_OR_RETURN(on_gpu->nonfinite, lane.Allocate(sizeof(uint64_t)));
    THALWEG_ASSIGN_OR_RETURN(runtimes.emplace_back(), device_.Find(lane.gpu().uuid()));
  }
  THALWEG_ASSIGN_OR_RETURN(group_, device_.GroupOf(terms_.job, runtimes));
  for (const auto& on_gpu : gpus_) on_gpu->lane->Join(group_);
  home_ = terms_.id.index % gpus_.size();
  return absl::OkStatus();
}

absl::Status CudaMemory::SumAtHome() {
  if (group_ == nullptr) THALWEG_RETURN_IF_ERROR(FormGroup());
  const uint64_t elems = terms_.layout.Elems();
  std::vector<DeviceGroup::Member> members;
  for (const auto& on_gpu : gpus_) {
    const GpuLane& lane = *on_gpu->lane;
    members.push_back({on_gpu->sum, lane.stream()});
    std::vector<const void*> shares;
    for (const auto& input : inputs_) {
      if (input->gpu == on_gpu.get()) shares.push_back(input->share.memory);
    }
    THALWEG_RETURN_IF_ERROR(lane.Bind());
    // The shares are divided before they are added up, so that fp16 does not overflow.
    THALWEG_RETURN_IF_ERROR(
        FoldMeanOnDevice(lane.kernel_stream(), shares, std::vector<float>(shares.size(), 1.0f),
                         static_cast<float>(terms_.local_size), terms_.share, terms_.share,
                         on_gpu->sum, elems, reinterpret_cast<uint64_t*>(on_gpu->nonfinite)));
  }
  return group_->Reduce(members, home_, terms_.share, elems);
}

absl::Status CudaMemory::EndRound() {
  if (gpus_.size() > 1) {
    std::vector<DeviceGroup::Member> members;
    for (const auto& on_gpu : gpus_) {
      members.push_back({on_gpu->result.memory, on_gpu->lane->stream()});
    }
    THALWEG_RETURN_IF_ERROR(
        group_->Broadcast(members, home_, terms_.layout.Elems() * SizeOf(terms_.layout.dtype)));
  }
  for (const auto& on_gpu : gpus_) {
    GpuLane& lane = *on_gpu->lane;
    THALWEG_RETURN_IF_ERROR(lane.Bind());
    THALWEG_RETURN_IF_ERROR(lane.gpu().Record(on_gpu->result.event, lane.stream()));
  }
  return absl::OkStatus();
}

std::unique_ptr<DenseCodec> CudaMemory::MakeCast(TensorSet tensors, const CodecPlace& place,
                                                 uint32_t number, DType wire) {
  return std::make_unique<CudaCast>(std::move(tensors), place, number, wire, *this);
}

absl::StatusOr<std::unique_ptr<BucketCodec>> CudaMemory::MakeLossy(TensorSet tensors,
                                                                   const CodecPlace& place,
                                                                   uint32_t number,
                                                                   const CodecSpec& spec,
                                                                   ParameterStates& states) {
  if (HasFixedSize(LossyFormat(spec))) {
    return CudaBlocks::Create(std::move(tensors), place, number, spec, states, *this);
  }
  return CudaTopK::Create(std::move(tensors), place, number, spec, states, *this);
}

absl::StatusOr<std::unique_ptr<BucketCodec>> CudaMemory::MakePowerSgd(TensorSet tensors,
                                                                      const CodecPlace& place,
                                                                      uint32_t number, DType dense,
                                                                      const CodecSpec& spec,
                                                                      ParameterStates& states) {
  return CudaPowerSgd::Create(std::move(tensors), place, number, dense, spec, states, *this);
}

}  // namespace thalweg
