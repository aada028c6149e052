// The tensors of one codec in the memory of a GPU: the gradient in float32, what earlier rounds
// left out of it, their norms, and the way into the result.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/sidecar/codec/bucket_codec.h"
#include "server/sidecar/codec/parameter_states.h"
#include "server/sidecar/cuda/cuda_memory.h"

namespace thalweg {

// All arrays are in the order of the set, with its padding. Guarded like the codec; the calling
// thread has to have the GPU bound.
class CudaTensors {
 public:
  // By tensor; null for one without a state.
  using States = std::span<const std::shared_ptr<ParameterState>>;
  enum class Norm { kWhole, kResidual };

  // `tensors` and `memory` must outlive it.
  CudaTensors(const TensorSet& tensors, CudaMemory& memory, bool has_residual)
      : tensors_(tensors), memory_(memory), has_residual_(has_residual) {}

  // From the first round on: where the codec works.
  GpuLane& lane() const { return memory_.home(); }

  // Once, in the first round.
  absl::Status Allocate();
  // Queues that the states' residuals are brought here, where they stay until they are saved,
  // unless they are here.
  absl::Status Load(States states);
  // Waits until they are back in the states, if they were here.
  absl::Status Save(States states);

  // The mean of the shares in float32: where it is, or queues that it is put together. It stays for
  // the round.
  absl::StatusOr<const float*> QueueValues();
  // Null without one. Zero where a tensor has no state, and in the padding until it is encoded.
  float* residual() const { return residual_; }
  // Queues that the residual of the padding becomes zero again.
  absl::Status ClearResidualOfPadding();

  // Queues the squared norm of a + b, or of a. Only with a residual.
  absl::Status QueueNorm(Norm which, const float* a, const float* b);
  // Returns the norms that were queued last, which must have come; zeros if there were none.
  CompressionLoss loss() const;

  // DecodeTarget returns where element `begin` of the result is to be decoded to, in float32; Place
  // queues the copies that bring elements [begin, end) from there to where they belong. `narrowed`,
  // on the GPU, or null: gets added how many of the results are NaN or infinite, unless the bucket
  // has float32 itself.
  float* DecodeTarget(uint64_t begin) const;
  absl::Status Place(uint64_t begin, uint64_t end, uint64_t* narrowed = nullptr);

 private:
  // Queues zeros for the padding in an array of elements of `size` bytes.
  absl::Status ClearPadding(void* array, size_t size);
  absl::Status AllocateZeros();
  // The set is one stretch of the bucket.
  bool IsOnePiece() const { return pieces_.size() == 1; }
  std::byte* Result(uint64_t element) const {
    return memory_.home_result() + element * SizeOf(tensors_.layout().dtype);
  }

  const TensorSet& tensors_;
  CudaMemory& memory_;
  const bool has_residual_;
  const std::vector<TensorSet::Piece> pieces_ = tensors_.BucketPieces(0, tensors_.Elems());
  bool is_loaded_ = false;  // the states are in residual_
  // On the GPU; null where not needed.
  std::byte* zeros_ = nullptr;   // as many as the padding has anywhere, in float32
  std::byte* narrow_ = nullptr;  // the mean in the shares' type
  float* values_ = nullptr;
  float* residual_ = nullptr;
  float* decoded_ = nullptr;
  double* partials_ = nullptr;
  // On the host.
  double* norms_ = nullptr;  // partial sums: of the whole, then of the residual
  float* staged_ = nullptr;  // the residual on its way
  StreamProgress* saved_ = nullptr;
};

}  // namespace thalweg
