#include "server/sidecar/cuda/cuda_blocks.h"

#include "core/base/status_macros.h"
#include "kernels/codec/block_cuda.h"

namespace thalweg {

absl::StatusOr<std::unique_ptr<CudaBlocks>> CudaBlocks::Create(
    TensorSet tensors, const CodecPlace& place, uint32_t number, const CodecSpec& spec,
    ParameterStates& states, CudaMemory& memory) {
  std::unique_ptr<CudaBlocks> codec(
      new CudaBlocks(std::move(tensors), place, number, spec, memory));
  THALWEG_RETURN_IF_ERROR(codec->TakeStates(states));
  return codec;
}

absl::Status CudaBlocks::Allocate() {
  THALWEG_ASSIGN_OR_RETURN(nonfinite_, lane().Allocate(sizeof(uint64_t)));
  return chunks_.Allocate(lane(), encoded_begins(), Name(format_));
}

// Blocks divide chunks, so the chunks' bytes are contiguous in those of the whole.
absl::Status CudaBlocks::QueueEncoding(const float* values, float* residual) {
  return EncodeBlocksOnDevice(lane().kernel_stream(), format_, values, residual, tensors_.Elems(),
                              chunks_.on_gpu(), reinterpret_cast<uint64_t*>(nonfinite_));
}

absl::StatusOr<std::span<const std::byte>> CudaBlocks::Encode(const Part& /*part*/, uint32_t chunk,
                                                              Gradient& gradient) {
  THALWEG_RETURN_IF_ERROR(gradient.WaitFor(tensors_.layout().Elems()));
  THALWEG_RETURN_IF_ERROR(lane().Bind());
  return chunks_.Sent(chunk);
}

absl::Status CudaBlocks::Decode(const Part& part, const RoundResult& received) {
  const uint32_t chunk = received.id.chunk;
  THALWEG_RETURN_IF_ERROR(lane().Bind());
  THALWEG_RETURN_IF_ERROR(chunks_.Receive(received));
  NoteOverflow(received);
  const uint64_t first = part.plan.Begin(chunk);
  THALWEG_RETURN_IF_ERROR(DecodeBlocksOnDevice(lane().kernel_stream(), format_,
                                               chunks_.on_gpu() + encoded_begins()[chunk],
                                               received.elems, DecodeTarget(first)));
  return Place(first, first + received.elems);
}

}  // namespace thalweg
