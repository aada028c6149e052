// CudaLossy is the LossyCodec for gradients in the memory of a GPU. Derived classes encode the
// formats.
#pragma once

#include <cstdint>
#include <utility>

#include "server/sidecar/codec/lossy_codec.h"
#include "server/sidecar/cuda/cuda_tensors.h"

namespace thalweg {

// The residual stays on the GPU, in the order of the set, until SaveStates.
class CudaLossy : public LossyCodec {
 public:
  // Queues everything that a round computes, and the sending of chunks whose size is known.
  absl::StatusOr<Part*> Begin(FoldPool& pool, Gradient& gradient) final;
  CompressionLoss loss() const final { return on_gpu_.loss(); }
  absl::Status SaveStates() final;

 protected:
  // `memory` must outlive it.
  CudaLossy(TensorSet tensors, const CodecPlace& place, uint32_t number, const CodecSpec& spec,
            CudaMemory& memory)
      : LossyCodec(std::move(tensors), place, number, spec),
        on_gpu_(tensors_, memory, spec.feedback) {}

  // Allocates the memory; called once before the first round.
  virtual absl::Status Allocate() = 0;
  // Both queue: the first encodes all chunks, the second sends them. `values` are the set's;
  // `residual` may be null.
  virtual absl::Status QueueEncoding(const float* values, float* residual) = 0;
  virtual absl::Status QueueSending() = 0;

  GpuLane& lane() const { return on_gpu_.lane(); }
  // These are CudaTensors's.
  float* DecodeTarget(uint64_t begin) const { return on_gpu_.DecodeTarget(begin); }
  absl::Status Place(uint64_t begin, uint64_t end) { return on_gpu_.Place(begin, end); }

 private:
  CudaTensors on_gpu_;
  bool is_allocated_ = false;
};

}  // namespace thalweg
