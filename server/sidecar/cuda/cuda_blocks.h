// CudaBlocks implements the formats whose payloads are blocks on a GPU: all blocks of a bucket in
// one launch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "server/sidecar/cuda/chunk_staging.h"
#include "server/sidecar/cuda/cuda_lossy.h"

namespace thalweg {

class CudaBlocks final : public CudaLossy {
 public:
  // `memory` must outlive it. InvalidArgument names a tensor whose state is of another size.
  static absl::StatusOr<std::unique_ptr<CudaBlocks>> Create(TensorSet tensors,
                                                            const CodecPlace& place,
                                                            uint32_t number, const CodecSpec& spec,
                                                            ParameterStates& states,
                                                            CudaMemory& memory);

  absl::StatusOr<std::span<const std::byte>> Encode(const Part& part, uint32_t chunk,
                                                    Gradient& gradient) override;
  absl::Status Decode(const Part& part, const RoundResult& received) override;

 private:
  using CudaLossy::CudaLossy;
  absl::Status Allocate() override;
  absl::Status QueueEncoding(const float* values, float* residual) override;
  absl::Status QueueSending() override { return chunks_.QueueSending(); }

  ChunkStaging chunks_;
  std::byte* nonfinite_ = nullptr;  // on the GPU: an unused count, because the shards count
};

}  // namespace thalweg
