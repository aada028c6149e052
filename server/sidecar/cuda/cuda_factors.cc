#include "server/sidecar/cuda/cuda_factors.h"

#include <array>

#include "core/base/status_macros.h"
#include "kernels/cast/cast_cuda.h"
#include "kernels/reduce/reduce_cuda.h"

namespace thalweg {

absl::Status CudaFactors::Allocate(GpuLane& lane, const Part& part, DType wire) {
  lane_ = &lane;
  part_ = &part;
  wire_ = wire;
  THALWEG_ASSIGN_OR_RETURN(std::byte* const values, lane.Allocate(bytes()));
  values_ = reinterpret_cast<float*>(values);
  const bool is_cast = wire != DType::kFloat32;
  if (is_cast) {
    THALWEG_ASSIGN_OR_RETURN(nonfinite_, lane.Allocate(sizeof(uint64_t)));
  }
  return chunks_.Allocate(lane, ChunkStaging::Begins(part.plan, SizeOf(wire)), Name(wire),
                          is_cast ? nullptr : values);
}

absl::Status CudaFactors::QueueSending() {
  if (wire_ != DType::kFloat32) {
    // Like on a node without GPUs, a fold of one input makes all NaNs the same one.
    const std::array<const void*, 1> inputs = {values_};
    const std::array<float, 1> weights = {1.0f};
    THALWEG_RETURN_IF_ERROR(FoldMeanOnDevice(
        lane_->kernel_stream(), inputs, weights, 1.0f, DType::kFloat32, wire_, chunks_.on_gpu(),
        part_->Elems(), reinterpret_cast<uint64_t*>(nonfinite_)));
  }
  return chunks_.QueueSending();
}

absl::Status CudaFactors::QueueMean() {
  if (wire_ == DType::kFloat32) return absl::OkStatus();
  return CastOnDevice(lane_->kernel_stream(), wire_, chunks_.on_gpu(), DType::kFloat32, values_,
                      part_->Elems());
}

}  // namespace thalweg
