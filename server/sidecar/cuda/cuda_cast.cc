#include "server/sidecar/cuda/cuda_cast.h"

#include <cstring>
#include <vector>

#include "core/base/status_macros.h"
#include "kernels/cast/cast_cuda.h"
#include "kernels/reduce/reduce_cuda.h"

namespace thalweg {

absl::Status CudaCast::Allocate() {
  GpuLane& lane = memory_.home();
  THALWEG_ASSIGN_OR_RETURN(nonfinite_, lane.Allocate(sizeof(uint64_t)));
  THALWEG_ASSIGN_OR_RETURN(counted_, lane.AllocateHost(sizeof(uint64_t)));
  finished_ = &lane.MakeProgress(1);
  return chunks_.Allocate(lane, ChunkStaging::Begins(part_.plan, SizeOf(wire_)), Name(wire_));
}

absl::Status CudaCast::Fold(bool into_result) {
  for (const TensorSet::Piece& piece : tensors_.BucketPieces(0, tensors_.Elems())) {
    const auto shares = memory_.Shares(piece.offset);
    THALWEG_RETURN_IF_ERROR(FoldMeanOnDevice(
        memory_.home().kernel_stream(), shares, std::vector<float>(shares.size(), 1.0f),
        static_cast<float>(shares.size()), memory_.share(), wire_,
        into_result ? Result(piece.offset) : Encoded(piece.begin), piece.elems,
        reinterpret_cast<uint64_t*>(nonfinite_)));
  }
  return absl::OkStatus();
}

absl::Status CudaCast::Widen(uint64_t begin, uint64_t end) {
  for (const TensorSet::Piece& piece : tensors_.BucketPieces(begin, end)) {
    THALWEG_RETURN_IF_ERROR(CastOnDevice(memory_.home().kernel_stream(), wire_,
                                         Encoded(piece.begin), tensors_.layout().dtype,
                                         Result(piece.offset), piece.elems));
  }
  return absl::OkStatus();
}

absl::StatusOr<Part*> CudaCast::Begin(FoldPool& /*pool*/, Gradient& /*gradient*/) {
  THALWEG_RETURN_IF_ERROR(memory_.home().Bind());
  if (!chunks_.IsAllocated()) THALWEG_RETURN_IF_ERROR(Allocate());
  if (place_.is_alone) {
    THALWEG_RETURN_IF_ERROR(Finish());
  } else {
    THALWEG_RETURN_IF_ERROR(Fold(/*into_result=*/false));
    THALWEG_RETURN_IF_ERROR(chunks_.QueueSending());
  }
  return &part_;
}

absl::Status CudaCast::Finish() {
  GpuLane& lane = memory_.home();
  finished_->Reset();
  std::memset(counted_, 0, sizeof(uint64_t));
  THALWEG_RETURN_IF_ERROR(
      lane.gpu().CopyToDevice(nonfinite_, counted_, sizeof(uint64_t), lane.stream()));
  THALWEG_RETURN_IF_ERROR(Fold(SameType()));
  if (!SameType()) THALWEG_RETURN_IF_ERROR(Widen(0, tensors_.Elems()));
  THALWEG_RETURN_IF_ERROR(
      lane.gpu().CopyToHost(counted_, nonfinite_, sizeof(uint64_t), lane.stream()));
  return finished_->Mark(lane.gpu(), lane.stream(), 1);
}

absl::StatusOr<std::span<const std::byte>> CudaCast::Encode(const Part& /*part*/, uint32_t chunk,
                                                            Gradient& gradient) {
  // It waits for the workers first, so that an error names the worker whose stream does not arrive.
  THALWEG_RETURN_IF_ERROR(gradient.WaitFor(tensors_.Elems()));
  THALWEG_RETURN_IF_ERROR(memory_.home().Bind());
  return chunks_.Sent(chunk);
}

absl::Status CudaCast::Decode(const Part& part, const RoundResult& received) {
  const uint64_t begin = part.plan.Begin(received.id.chunk);
  const uint64_t end = begin + received.elems;
  GpuLane& lane = memory_.home();
  THALWEG_RETURN_IF_ERROR(lane.Bind());
  if (!SameType()) {
    THALWEG_RETURN_IF_ERROR(chunks_.Receive(received));
    return Widen(begin, end);
  }
  THALWEG_ASSIGN_OR_RETURN(const std::byte* const gathered, chunks_.Gather(received));
  for (const TensorSet::Piece& piece : tensors_.BucketPieces(begin, end)) {
    const size_t size = SizeOf(wire_);
    THALWEG_RETURN_IF_ERROR(lane.gpu().CopyToDevice(Result(piece.offset),
                                                    gathered + (piece.begin - begin) * size,
                                                    piece.elems * size, lane.stream()));
  }
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> CudaCast::Reduce(uint32_t chunk, Gradient& gradient) {
  THALWEG_RETURN_IF_ERROR(gradient.WaitFor(tensors_.Elems()));
  THALWEG_RETURN_IF_ERROR(memory_.home().Bind());
  THALWEG_RETURN_IF_ERROR(memory_.home().WaitFor(*finished_, 1));
  uint64_t nonfinite = 0;
  if (chunk == 0) std::memcpy(&nonfinite, counted_, sizeof(nonfinite));  // for all chunks
  return nonfinite;
}

}  // namespace thalweg
