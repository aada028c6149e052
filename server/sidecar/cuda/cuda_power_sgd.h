// PowerSgd for gradients in the memory of a GPU. A round sends, gets and keeps the bits of one on a
// node without GPUs but for P, whose sums are in another order
// (kernels/codec/powersgd/powersgd_cuda.h).
//
// Residuals stay on the GPU until SaveStates. So does Q: at the end of a round it is made
// orthonormal for the next one, and goes to the host as it was before. There it is prepared
// instead, as on a node without GPUs, where that takes more: to begin with, without warm start, and
// when a direction of it has died.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/codec/powersgd/powersgd_cuda.h"
#include "server/sidecar/codec/power_sgd.h"
#include "server/sidecar/cuda/cuda_factors.h"
#include "server/sidecar/cuda/cuda_tensors.h"

namespace thalweg {

class CudaPowerSgd final : public PowerSgd {
 public:
  // As CpuPowerSgd::Create. `memory` must outlive it. InvalidArgument also for a matrix that the
  // kernels cannot take.
  static absl::StatusOr<std::unique_ptr<CudaPowerSgd>> Create(
      TensorSet tensors, const CodecPlace& place, uint32_t number, DType dense,
      const CodecSpec& spec, ParameterStates& states, CudaMemory& memory);

  CompressionLoss loss() const override { return on_gpu_.loss(); }
  absl::Status SaveStates() override;

 private:
  // What kernels count: elements that are not finite, in this round's matrices.
  enum Count { kInGradient, kInP, kInResult, kInQ, kCounts };

  CudaPowerSgd(TensorSet tensors, const CodecPlace& place, uint32_t number, const CodecSpec& spec,
               std::unique_ptr<DenseCodec> whole, CudaMemory& memory);
  absl::Status MakePlan();
  absl::Status Allocate();
  // Queues what stays as it is.
  absl::Status QueueConstants();

  absl::Status Project(FoldPool& pool, Gradient& gradient) override;
  absl::StatusOr<bool> ProjectTransposed(FoldPool& pool) override;
  absl::StatusOr<uint64_t> Reconstruct(FoldPool& pool) override;
  absl::Status GiveUp(FoldPool& pool, Gradient& gradient) override;
  absl::StatusOr<std::span<const std::byte>> EncodeFactors(const Part& part, uint32_t chunk,
                                                           Gradient& gradient) override;
  absl::Status DecodeFactors(const Part& part, const RoundResult& received) override;

  // Has q_ be the orthonormal Q with which the round begins.
  absl::Status PrepareQ(FoldPool& pool);
  // Whether what QueueNextQ has left in q_ is what the next round begins with.
  bool IsNextQReady() const;
  // second_factors_ hold what the next round's Q is made of: queues that.
  absl::Status QueueNextQ();
  // Takes that to the states.
  void KeepFactors();
  absl::Status QueueResult();
  // Queues that a count is brought to the host.
  absl::Status QueueCount(Count count);
  CudaFactors& Of(const Part& part) {
    return &part == first_.get() ? first_factors_ : second_factors_;
  }
  GpuLane& lane() const { return on_gpu_.lane(); }
  PowerSgdMemory kernel_memory() const { return {table_, reinterpret_cast<double*>(workspace_)}; }

  CudaTensors on_gpu_;
  std::vector<std::shared_ptr<ParameterState>> states_;  // by tensor; null for plain ones
  std::vector<Plain> runs_;  // plain tensors, joined where they follow each other
  std::optional<PowerSgdPlan> plan_;
  CudaFactors first_factors_;
  CudaFactors second_factors_;
  const float* values_ = nullptr;  // the gradient of the round in flight
  bool is_allocated_ = false;
  bool has_next_q_ = false;  // QueueNextQ has been called since the states were taken up

  // On the GPU.
  std::byte* table_ = nullptr;
  std::byte* workspace_ = nullptr;
  float* q_ = nullptr;
  float* zeros_ = nullptr;      // in place of a residual, without error feedback
  uint32_t* zeroed_ = nullptr;  // by column of the factors
  uint64_t* counts_ = nullptr;
  // On the host.
  float* host_q_ = nullptr;
  uint32_t* host_zeroed_ = nullptr;
  uint64_t* host_counts_ = nullptr;
  uint64_t* no_counts_ = nullptr;  // zeros
  StreamProgress* counted_p_ = nullptr;
  StreamProgress* counted_result_ = nullptr;
  StreamProgress* made_next_q_ = nullptr;
};

}  // namespace thalweg
