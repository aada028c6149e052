// CudaPowerSgd is PowerSgd for gradients in the memory of a GPU. A round sends, receives and keeps
// the same bits as on a node without GPUs, except for P, whose sums are in another order
// (kernels/codec/powersgd/powersgd_cuda.h).
//
// Residuals stay on the GPU until SaveStates. So does Q: at the end of a round it is
// orthonormalised for the next one, and its previous value is copied to the host. In the cases that
// need more, Q is prepared on the host, as on a node without GPUs: in the first round, without warm
// start, and when one of its directions became zero.
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
  // See CpuPowerSgd::Create. `memory` must outlive it. InvalidArgument also for a matrix that the
  // kernels cannot take.
  static absl::StatusOr<std::unique_ptr<CudaPowerSgd>> Create(
      TensorSet tensors, const CodecPlace& place, uint32_t number, DType dense,
      const CodecSpec& spec, ParameterStates& states, CudaMemory& memory);

  CompressionLoss loss() const override { return on_gpu_.loss(); }
  absl::Status SaveStates() override;

 private:
  // The kernels count elements that are not finite, in this round's matrices, and in all of a
  // result that was narrowed.
  enum Count { kInGradient, kInP, kInResult, kInQ, kNarrowed, kCounts };

  CudaPowerSgd(TensorSet tensors, const CodecPlace& place, uint32_t number, const CodecSpec& spec,
               std::unique_ptr<DenseCodec> whole, CudaMemory& memory);
  absl::Status MakePlan();
  absl::Status Allocate();
  // Queues the copies of data that does not change.
  absl::Status QueueConstants();

  absl::Status Project(FoldPool& pool, Gradient& gradient) override;
  absl::StatusOr<bool> ProjectTransposed(FoldPool& pool) override;
  absl::StatusOr<bool> IsQFinite() override;
  absl::StatusOr<uint64_t> Reconstruct(FoldPool& pool) override;
  absl::Status GiveUp(FoldPool& pool, Gradient& gradient) override;
  absl::StatusOr<std::span<const std::byte>> EncodeFactors(const Part& part, uint32_t chunk,
                                                           Gradient& gradient) override;
  absl::Status DecodeFactors(const Part& part, const RoundResult& received) override;

  // Sets q_ to the orthonormal Q with which the round begins.
  absl::Status PrepareQ(FoldPool& pool);
  // Returns whether the next round begins with what QueueNextQ has left in q_.
  bool IsNextQReady() const;
  // Queues the preparation of the next round's Q from second_factors_.
  absl::Status QueueNextQ();
  // Copies the factors to the states.
  void KeepFactors();
  absl::Status QueueResult();
  bool IsNarrowed() const { return tensors_.layout().dtype != DType::kFloat32; }
  // Queues the copy of a count to the host.
  absl::Status QueueCount(Count count);
  CudaFactors& Of(const Part& part) {
    return &part == first_.get() ? first_factors_ : second_factors_;
  }
  GpuLane& lane() const { return on_gpu_.lane(); }
  PowerSgdMemory kernel_memory() const { return {table_, reinterpret_cast<double*>(workspace_)}; }

  CudaTensors on_gpu_;
  std::vector<Plain> runs_;  // plain tensors, merged where they are contiguous
  std::optional<PowerSgdPlan> plan_;
  CudaFactors first_factors_;
  CudaFactors second_factors_;
  const float* values_ = nullptr;  // gradient of the round in flight
  bool is_allocated_ = false;
  bool has_next_q_ = false;  // QueueNextQ has been called since the states were loaded

  // These are on the GPU.
  std::byte* table_ = nullptr;
  std::byte* workspace_ = nullptr;
  float* q_ = nullptr;
  float* zeros_ = nullptr;      // replaces the residual without error feedback
  uint32_t* zeroed_ = nullptr;  // by column of the factors
  uint64_t* counts_ = nullptr;
  // These are on the host.
  float* host_q_ = nullptr;
  uint32_t* host_zeroed_ = nullptr;
  uint64_t* host_counts_ = nullptr;
  uint64_t* no_counts_ = nullptr;  // zeros
  StreamProgress* counted_p_ = nullptr;
  StreamProgress* counted_result_ = nullptr;
  StreamProgress* made_next_q_ = nullptr;
};

}  // namespace thalweg
