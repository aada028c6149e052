#include "server/sidecar/cuda/cuda_topk.h"

#include <algorithm>
#include <cstring>

#include "core/base/status_macros.h"
#include "kernels/codec/topk/topk.h"
#include "kernels/codec/topk/topk_cuda.h"

namespace thalweg {

absl::StatusOr<std::unique_ptr<CudaTopK>> CudaTopK::Create(TensorSet tensors,
                                                           const CodecPlace& place, uint32_t number,
                                                           const CodecSpec& spec,
                                                           ParameterStates& states,
                                                           CudaMemory& memory) {
  std::unique_ptr<CudaTopK> codec(new CudaTopK(std::move(tensors), place, number, spec, memory));
  THALWEG_RETURN_IF_ERROR(codec->TakeStates(states));
  return codec;
}

absl::Status CudaTopK::Allocate() {
  const uint32_t count = part_.plan.Count();
  uint64_t most_elems = 0;
  for (uint32_t chunk = 0; chunk < count; ++chunk) {
    most_elems = std::max(most_elems, part_.plan.Elems(chunk));
  }
  const uint64_t sizes = std::max<uint64_t>(1, count) * sizeof(Encoded);
  THALWEG_ASSIGN_OR_RETURN(encoded_,
                           lane().Allocate(std::max<uint64_t>(1, encoded_begins().back())));
  THALWEG_ASSIGN_OR_RETURN(scratch_, lane().Allocate(TopKScratchBytes(most_elems)));
  THALWEG_ASSIGN_OR_RETURN(std::byte* const on_gpu, lane().Allocate(sizes));
  sizes_ = reinterpret_cast<Encoded*>(on_gpu);
  THALWEG_ASSIGN_OR_RETURN(std::byte* const on_host, lane().AllocateHost(sizes));
  known_sizes_ = reinterpret_cast<Encoded*>(on_host);
  progress_ = &lane().MakeProgress(1);
  chunks_.resize(count);
  for (Chunk& chunk : chunks_) chunk.fetched = &lane().MakeProgress(1);
  return absl::OkStatus();
}

absl::Status CudaTopK::QueueEncoding(const float* values, float* residual) {
  for (uint32_t chunk = 0; chunk < part_.plan.Count(); ++chunk) {
    const uint64_t begin = part_.plan.Begin(chunk);
    const uint64_t elems = part_.plan.Elems(chunk);
    THALWEG_RETURN_IF_ERROR(EncodeTopKOnDevice(
        lane().kernel_stream(), values + begin, residual == nullptr ? nullptr : residual + begin,
        elems, TopKCount(spec_.topk_ratio, elems), encoded_ + encoded_begins()[chunk],
        sizes_ + chunk, scratch_));
  }
  return absl::OkStatus();
}

absl::Status CudaTopK::QueueSending() {
  progress_->Reset();
  for (Chunk& chunk : chunks_) chunk.fetched->Reset();
  THALWEG_RETURN_IF_ERROR(lane().gpu().CopyToHost(
      known_sizes_, sizes_, chunks_.size() * sizeof(Encoded), lane().stream()));
  return progress_->Mark(lane().gpu(), lane().stream(), 1);
}

absl::Status CudaTopK::Grow(Staging& staging, uint64_t bytes, bool on_gpu) {
  if (staging.bytes >= bytes) return absl::OkStatus();
  // The old memory is kept until the end, so the new one is larger by at least half.
  staging.bytes = std::max(bytes, staging.bytes + staging.bytes / 2);
  THALWEG_ASSIGN_OR_RETURN(staging.host, lane().AllocateHost(staging.bytes));
  if (on_gpu) {
    THALWEG_ASSIGN_OR_RETURN(staging.gpu, lane().Allocate(staging.bytes));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::span<const std::byte>> CudaTopK::Encode(const Part& /*part*/, uint32_t number,
                                                            Gradient& gradient) {
  THALWEG_RETURN_IF_ERROR(gradient.WaitFor(tensors_.Elems()));
  THALWEG_RETURN_IF_ERROR(lane().Bind());
  THALWEG_RETURN_IF_ERROR(lane().WaitFor(*progress_, 1));
  Chunk& chunk = chunks_[number];
  const uint64_t bytes = known_sizes_[number].bytes;
  THALWEG_RETURN_IF_ERROR(Grow(chunk.sent, bytes, /*on_gpu=*/false));
  THALWEG_RETURN_IF_ERROR(lane().gpu().CopyToHost(
      chunk.sent.host, encoded_ + encoded_begins()[number], bytes, lane().stream()));
  THALWEG_RETURN_IF_ERROR(chunk.fetched->Mark(lane().gpu(), lane().stream(), 1));
  THALWEG_RETURN_IF_ERROR(lane().WaitFor(*chunk.fetched, 1));
  return std::span<const std::byte>(chunk.sent.host, bytes);
}

absl::Status CudaTopK::Decode(const Part& part, const RoundResult& received) {
  std::vector<std::byte> payload;
  payload.reserve(received.payload.SizeBytes());
  for (const auto& piece : received.payload.pieces) {
    payload.insert(payload.end(), piece.begin(), piece.end());
  }
  THALWEG_RETURN_IF_ERROR(CheckTopK(payload, received.elems));
  NoteOverflow(received);
  uint64_t count = 0;
  for (TopKEntries entry(payload); !entry.Done(); entry.Next()) ++count;
  THALWEG_RETURN_IF_ERROR(lane().Bind());
  Staging& staging = chunks_[received.id.chunk].entries;
  const uint64_t bytes = count * (sizeof(uint32_t) + sizeof(float));
  THALWEG_RETURN_IF_ERROR(Grow(staging, std::max<uint64_t>(1, bytes), /*on_gpu=*/true));
  auto* const indices = reinterpret_cast<uint32_t*>(staging.host);
  auto* const values = reinterpret_cast<float*>(indices + count);
  uint64_t next = 0;
  for (TopKEntries entry(payload); !entry.Done(); entry.Next(), ++next) {
    indices[next] = static_cast<uint32_t>(entry.index());
    values[next] = entry.value();
  }
  if (bytes > 0) {
    THALWEG_RETURN_IF_ERROR(
        lane().gpu().CopyToDevice(staging.gpu, staging.host, bytes, lane().stream()));
  }
  const auto* const on_gpu = reinterpret_cast<const uint32_t*>(staging.gpu);
  const uint64_t begin = part.plan.Begin(received.id.chunk);
  THALWEG_RETURN_IF_ERROR(ScatterTopKOnDevice(lane().kernel_stream(), on_gpu,
                                              reinterpret_cast<const float*>(on_gpu + count), count,
                                              DecodeTarget(begin), received.elems));
  return Place(begin, begin + received.elems);
}

}  // namespace thalweg
