#include "server/sidecar/cuda/chunk_staging.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"

namespace thalweg {

std::vector<uint64_t> ChunkStaging::Begins(const ChunkPlan& plan, uint64_t elem_bytes) {
  std::vector<uint64_t> begins = {0};
  for (uint32_t chunk = 0; chunk < plan.Count(); ++chunk) {
    begins.push_back(begins.back() + plan.Elems(chunk) * elem_bytes);
  }
  return begins;
}

absl::Status ChunkStaging::Allocate(GpuLane& lane, std::vector<uint64_t> begins,
                                    absl::string_view what, std::byte* on_gpu) {
  begins_ = std::move(begins);
  what_ = what;
  on_gpu_ = on_gpu;
  const uint64_t bytes = std::max<uint64_t>(1, begins_.back());
  if (on_gpu == nullptr) {
    THALWEG_ASSIGN_OR_RETURN(on_gpu_, lane.Allocate(bytes));
  }
  THALWEG_ASSIGN_OR_RETURN(sent_, lane.AllocateHost(bytes));
  THALWEG_ASSIGN_OR_RETURN(received_, lane.AllocateHost(bytes));
  progress_ = &lane.MakeProgress(static_cast<uint32_t>(begins_.size() - 1));
  lane_ = &lane;
  return absl::OkStatus();
}

absl::Status ChunkStaging::QueueSending() {
  progress_->Reset();
  for (uint32_t chunk = 0; chunk + 1 < begins_.size(); ++chunk) {
    const uint64_t begin = begins_[chunk];
    THALWEG_RETURN_IF_ERROR(
        lane_->gpu().CopyToHost(sent_ + begin, on_gpu_ + begin, Bytes(chunk), lane_->stream()));
    THALWEG_RETURN_IF_ERROR(progress_->Mark(lane_->gpu(), lane_->stream(), chunk + 1));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::span<const std::byte>> ChunkStaging::Sent(uint32_t chunk) const {
  THALWEG_RETURN_IF_ERROR(lane_->WaitFor(*progress_, chunk + 1));
  return std::span<const std::byte>(sent_ + begins_[chunk], Bytes(chunk));
}

absl::StatusOr<const std::byte*> ChunkStaging::Gather(const RoundResult& received) {
  const uint32_t chunk = received.id.chunk;
  if (received.payload.SizeBytes() != Bytes(chunk)) {
    return absl::InvalidArgumentError(absl::StrCat("a payload of ", received.elems, " ", what_,
                                                   " values has ", received.payload.SizeBytes(),
                                                   " bytes, expected ", Bytes(chunk)));
  }
  std::byte* const gathered = received_ + begins_[chunk];
  std::byte* to = gathered;
  for (const auto& piece : received.payload.pieces) {
    std::memcpy(to, piece.data(), piece.size());
    to += piece.size();
  }
  return gathered;
}

absl::Status ChunkStaging::Receive(const RoundResult& received) {
  const uint32_t chunk = received.id.chunk;
  THALWEG_ASSIGN_OR_RETURN(const std::byte* const gathered, Gather(received));
  return lane_->gpu().CopyToDevice(on_gpu_ + begins_[chunk], gathered, Bytes(chunk),
                                   lane_->stream());
}

}  // namespace thalweg
