#include "server/sidecar/cuda/cuda_lossy.h"

#include "core/base/status_macros.h"

namespace thalweg {

absl::StatusOr<Part*> CudaLossy::Begin(FoldPool& /*pool*/, Gradient& /*gradient*/) {
  ForgetOverflow();
  using Norm = CudaTensors::Norm;
  THALWEG_RETURN_IF_ERROR(lane().Bind());
  if (!is_allocated_) {
    THALWEG_RETURN_IF_ERROR(on_gpu_.Allocate());
    THALWEG_RETURN_IF_ERROR(Allocate());
  }
  is_allocated_ = true;
  THALWEG_RETURN_IF_ERROR(on_gpu_.Load(states_));
  THALWEG_ASSIGN_OR_RETURN(const float* const values, on_gpu_.QueueValues());
  float* const residual = on_gpu_.residual();
  // The part begins its round after this, so its round is still the last one.
  const bool is_sampled = spec_.feedback && (part_.round + 1) % kSampleEvery == 1;
  if (is_sampled) THALWEG_RETURN_IF_ERROR(on_gpu_.QueueNorm(Norm::kWhole, values, residual));
  THALWEG_RETURN_IF_ERROR(QueueEncoding(values, residual));
  if (spec_.feedback) THALWEG_RETURN_IF_ERROR(on_gpu_.ClearResidualOfPadding());
  if (is_sampled) THALWEG_RETURN_IF_ERROR(on_gpu_.QueueNorm(Norm::kResidual, residual, nullptr));
  THALWEG_RETURN_IF_ERROR(QueueSending());
  return &part_;
}

absl::Status CudaLossy::SaveStates() {
  if (!is_allocated_) return absl::OkStatus();
  THALWEG_RETURN_IF_ERROR(lane().Bind());
  return on_gpu_.Save(states_);
}

}  // namespace thalweg
