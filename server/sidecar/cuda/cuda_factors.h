// What PowerSGD exchanges in one of its parts, on a GPU: this node's values until they are sent,
// then the mean over the nodes.
//
//   values ─cast─▶ wire type ─▶ host ─▶ network ─▶ host ─▶ wire type ─cast─▶ values
//
// Without casts when the wire's type is float32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/dtype.h"
#include "core/base/exchange.h"
#include "server/sidecar/cuda/chunk_staging.h"
#include "server/sidecar/cuda/gpu_lane.h"
#include "server/sidecar/part.h"

namespace thalweg {

// Everything is queued on the lane. The calling thread has to have the GPU bound.
class CudaFactors {
 public:
  // Once. Both must outlive it.
  absl::Status Allocate(GpuLane& lane, const Part& part, DType wire);

  // In float32, on the GPU.
  float* values() const { return values_; }
  uint64_t bytes() const { return part_->Elems() * sizeof(float); }

  // Queues that the values are sent.
  absl::Status QueueSending();
  // Waits for a chunk of them. Thread-safe, as is Receive for different chunks.
  absl::StatusOr<std::span<const std::byte>> Sent(uint32_t chunk) const {
    return chunks_.Sent(chunk);
  }
  // Queues that a chunk of the mean is brought to the GPU. InvalidArgument: it is of another size.
  absl::Status Receive(const RoundResult& received) { return chunks_.Receive(received); }
  // Queues that the values are the mean, when all of it has come.
  absl::Status QueueMean();

 private:
  GpuLane* lane_ = nullptr;
  const Part* part_ = nullptr;
  DType wire_ = DType::kFloat32;
  float* values_ = nullptr;         // on the GPU
  ChunkStaging chunks_;             // in wire type: the values themselves in float32
  std::byte* nonfinite_ = nullptr;  // on the GPU: a count that nobody reads, since shards count
};

}  // namespace thalweg
