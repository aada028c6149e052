// CudaFactors holds one of PowerSGD's parts on a GPU: this node's values until they are sent, then
// the mean over the nodes.
//
//   values ─cast─▶ wire type ─▶ host ─▶ network ─▶ host ─▶ wire type ─cast─▶ values
//
// There are no casts when the wire's type is float32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/dtype.h"
#include "core/exchange/rounds.h"
#include "server/sidecar/codec/part.h"
#include "server/sidecar/cuda/chunk_staging.h"
#include "server/sidecar/cuda/gpu_lane.h"

namespace thalweg {

// All work is queued on the lane. The GPU must be bound to the calling thread.
class CudaFactors {
 public:
  // Allocates the memory; call once. Both arguments must outlive this object.
  absl::Status Allocate(GpuLane& lane, const Part& part, DType wire);

  // Returns the values, in float32 on the GPU.
  float* values() const { return values_; }
  uint64_t bytes() const { return part_->Elems() * sizeof(float); }

  // Queues the sending of the values.
  absl::Status QueueSending();
  // Waits for a chunk of them. Thread-safe, as is Receive for different chunks.
  absl::StatusOr<std::span<const std::byte>> Sent(uint32_t chunk) const {
    return chunks_.Sent(chunk);
  }
  // Queues the copy of a chunk of the mean to the GPU. InvalidArgument: it has another size.
  absl::Status Receive(const RoundResult& received) { return chunks_.Receive(received); }
  // Queues the conversion of the mean to values, when all of it has arrived.
  absl::Status QueueMean();

 private:
  GpuLane* lane_ = nullptr;
  const Part* part_ = nullptr;
  DType wire_ = DType::kFloat32;
  float* values_ = nullptr;         // on the GPU
  ChunkStaging chunks_;             // in wire type; in float32 the values themselves
  std::byte* nonfinite_ = nullptr;  // on the GPU: an unused count, because the shards count
};

}  // namespace thalweg
