// CudaTopK implements the format topk on a GPU, chunk by chunk. The size of a chunk is known only
// after encoding, so the thread that sends a chunk fetches it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/codec/encoded.h"
#include "server/sidecar/cuda/cuda_lossy.h"

namespace thalweg {

class CudaTopK final : public CudaLossy {
 public:
  // `memory` must outlive it. InvalidArgument names a tensor whose state is of another size.
  static absl::StatusOr<std::unique_ptr<CudaTopK>> Create(TensorSet tensors,
                                                          const CodecPlace& place, uint32_t number,
                                                          const CodecSpec& spec,
                                                          ParameterStates& states,
                                                          CudaMemory& memory);

  absl::StatusOr<std::span<const std::byte>> Encode(const Part& part, uint32_t chunk,
                                                    Gradient& gradient) override;
  absl::Status Decode(const Part& part, const RoundResult& received) override;

 private:
  // A Staging is host memory for one chunk and the same on the GPU, which grow as needed: between a
  // hundredth of the chunk and several times its size. Only one thread at a time may use it.
  struct Staging {
    std::byte* host = nullptr;
    std::byte* gpu = nullptr;
    uint64_t bytes = 0;
  };
  struct Chunk {
    Staging sent;  // has no memory on the GPU
    Staging entries;
    StreamProgress* fetched = nullptr;
  };

  using CudaLossy::CudaLossy;
  absl::Status Allocate() override;
  absl::Status QueueEncoding(const float* values, float* residual) override;
  absl::Status QueueSending() override;
  absl::Status Grow(Staging& staging, uint64_t bytes, bool on_gpu);

  std::byte* encoded_ = nullptr;    // on the GPU
  std::byte* scratch_ = nullptr;    // on the GPU
  Encoded* sizes_ = nullptr;        // on the GPU, by chunk
  Encoded* known_sizes_ = nullptr;  // on the host
  StreamProgress* progress_ = nullptr;
  std::vector<Chunk> chunks_;
};

}  // namespace thalweg
