// CudaCast is the DenseCodec for gradients in the memory of a GPU.
#pragma once

#include <cstddef>
#include <cstdint>

#include "server/sidecar/codec/dense_codec.h"
#include "server/sidecar/cuda/chunk_staging.h"
#include "server/sidecar/cuda/cuda_memory.h"

namespace thalweg {

class CudaCast final : public DenseCodec {
 public:
  // `memory` must outlive it.
  CudaCast(TensorSet tensors, const CodecPlace& place, uint32_t number, DType wire,
           CudaMemory& memory)
      : DenseCodec(std::move(tensors), place, number, wire), memory_(memory) {}

  // Queues everything that a round sends.
  absl::StatusOr<Part*> Begin(FoldPool& pool, Gradient& gradient) override;
  absl::StatusOr<std::span<const std::byte>> Encode(const Part& part, uint32_t chunk,
                                                    Gradient& gradient) override;
  absl::Status Decode(const Part& part, const RoundResult& received) override;
  absl::StatusOr<uint64_t> Reduce(uint32_t chunk, Gradient& gradient) override;

 private:
  absl::Status Allocate();
  // Folds the shares, in wire type, into the staging's memory or directly into the result.
  absl::Status Fold(bool into_result);
  // Widens elements [begin, end) of the encoded values into the result.
  absl::Status Widen(uint64_t begin, uint64_t end);
  // Completes the round on a node that is alone and does not send.
  absl::Status Finish();
  bool SameType() const { return wire_ == tensors_.layout().dtype; }
  std::byte* Encoded(uint64_t element) const { return chunks_.on_gpu() + element * SizeOf(wire_); }
  std::byte* Result(uint64_t element) const {
    return memory_.home_result() + element * SizeOf(tensors_.layout().dtype);
  }

  CudaMemory& memory_;
  // Allocated in the first round. Received chunks are copied to the GPU if they must be widened, or
  // else directly to the result.
  ChunkStaging chunks_;
  std::byte* nonfinite_ = nullptr;  // on the GPU
  std::byte* counted_ = nullptr;    // its copy on the host
  StreamProgress* finished_ = nullptr;
};

}  // namespace thalweg
