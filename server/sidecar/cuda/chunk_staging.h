// ChunkStaging holds the bytes of chunks between a GPU and the network, for codecs whose chunks
// have known sizes.
//
//   on_gpu ─copy─▶ sent ─▶ network ─▶ received ─copy─▶ on_gpu
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/base/layout.h"
#include "core/exchange/rounds.h"
#include "server/sidecar/cuda/gpu_lane.h"

namespace thalweg {

// All work is queued on the lane. The GPU must be bound to the calling thread.
class ChunkStaging {
 public:
  // Returns where chunks begin, and where the last one ends, if elements have that many bytes.
  static std::vector<uint64_t> Begins(const ChunkPlan& plan, uint64_t elem_bytes);

  // Allocates the memory; call once. `lane` must outlive this object. `on_gpu` is where the bytes
  // are on the GPU; null: in memory of its own. `what` names the values of a payload in messages.
  absl::Status Allocate(GpuLane& lane, std::vector<uint64_t> begins, absl::string_view what,
                        std::byte* on_gpu = nullptr);
  bool IsAllocated() const { return lane_ != nullptr; }
  std::byte* on_gpu() const { return on_gpu_; }

  // Queues the sending of all chunks.
  absl::Status QueueSending();
  // Waits for a chunk and returns its bytes. It is thread-safe, as are the following for different
  // chunks.
  absl::StatusOr<std::span<const std::byte>> Sent(uint32_t chunk) const;
  // Copies the pieces of a payload together on the host, where they stay until the chunk is
  // gathered again. InvalidArgument: it has another size.
  absl::StatusOr<const std::byte*> Gather(const RoundResult& received);
  // Gathers the payload and queues its copy to the GPU.
  absl::Status Receive(const RoundResult& received);

 private:
  uint64_t Bytes(uint32_t chunk) const { return begins_[chunk + 1] - begins_[chunk]; }

  GpuLane* lane_ = nullptr;
  std::vector<uint64_t> begins_;
  absl::string_view what_;
  std::byte* on_gpu_ = nullptr;
  std::byte* sent_ = nullptr;      // on the host
  std::byte* received_ = nullptr;  // on the host
  StreamProgress* progress_ = nullptr;
};

}  // namespace thalweg
