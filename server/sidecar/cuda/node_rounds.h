// For tests: one node's rounds of a codec, with its gradients on fake GPUs or in host memory.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "core/base/status_macros.h"
#include "server/sidecar/codec/bucket_codec.h"
#include "server/sidecar/cuda/fake_gpus.h"
#include "server/sidecar/cuda/test_floats.h"
#include "server/sidecar/device/cpu_device.h"

namespace thalweg {

inline constexpr Duration kPatience = std::chrono::seconds(20);

// Waits as the sidecar does.
class MemoryGradient : public Gradient {
 public:
  explicit MemoryGradient(BucketMemory& memory, DType share = DType::kFloat32)
      : Gradient(share), memory_(memory) {}
  absl::Status WaitFor(uint64_t) override {
    return memory_.WaitInput(0, 1, Now() + kPatience) >= 1
               ? absl::OkStatus()
               : absl::DeadlineExceededError("rank 0 is late");
  }
  std::vector<const void*> Shares(uint64_t begin) const override { return memory_.Shares(begin); }

 private:
  BucketMemory& memory_;
};

using Sent = std::vector<std::byte>;

// Takes a codec through a round of a node whose peers all send the same. What has been sent.
inline absl::StatusOr<Sent> RunRound(BucketCodec& codec, BucketMemory& memory,
                                     DType share = DType::kFloat32) {
  Sent sent;
  FoldPool pool(1);
  MemoryGradient gradient(memory, share);
  THALWEG_RETURN_IF_ERROR(memory.BeginRound());
  THALWEG_ASSIGN_OR_RETURN(Part * part, codec.Begin(pool, gradient));
  while (part != nullptr) {
    part->BeginRound();
    for (uint32_t chunk = 0; chunk < part->plan.Count(); ++chunk) {
      THALWEG_ASSIGN_OR_RETURN(const auto share, codec.Encode(*part, chunk, gradient));
      sent.insert(sent.end(), share.begin(), share.end());
      // The result comes in pieces that end anywhere.
      RoundResult result;
      result.id = {part->bucket.id, chunk, part->round};
      result.wire = part->bucket.wire;
      result.elems = part->plan.Elems(chunk);
      result.payload.pieces = {share.first(share.size() / 3), share.subspan(share.size() / 3)};
      THALWEG_RETURN_IF_ERROR(codec.Decode(*part, result));
    }
    if (codec.EndsWith(*part)) break;
    THALWEG_ASSIGN_OR_RETURN(part, codec.Next(pool, gradient));
  }
  THALWEG_RETURN_IF_ERROR(memory.EndRound());
  codec.CountRound();
  return sent;
}

// A node without GPUs.
class CpuNode {
 public:
  CpuNode(const BucketLayout& layout, uint32_t workers)
      : elems_(layout.Elems()),
        dtype_(layout.dtype),
        memory_(*CpuDevice().MakeMemory({{3}, layout, layout.dtype, workers})) {
    for (uint32_t rank = 0; rank < workers; ++rank) {
      arenas_.push_back(*BucketArena::Create("input", elems_ * SizeOf(dtype_), true));
      arenas_.back().PublishReady(1 << 30);
      EXPECT_TRUE(memory_->AddInput(rank, UniqueFd(dup(arenas_.back().fd())), {}).ok());
    }
  }
  BucketMemory& memory() { return *memory_; }
  void Make(const std::vector<Floats>& gradients) {
    for (size_t rank = 0; rank < arenas_.size(); ++rank) {
      const auto share = Narrowed(gradients[rank], dtype_);
      std::memcpy(arenas_[rank].payload(), share.data(), share.size());
    }
  }
  Floats Result() { return Widened(memory_->result().payload(), dtype_, elems_); }

 private:
  const uint64_t elems_;
  const DType dtype_;
  std::unique_ptr<BucketMemory> memory_;
  std::vector<BucketArena> arenas_;
};

// A node whose workers share one GPU.
class GpuNode {
 public:
  GpuNode(FakeGpus& gpus, CudaDevice& device, const BucketLayout& layout, uint32_t workers)
      : elems_(layout.Elems()),
        dtype_(layout.dtype),
        memory_(*device.MakeMemory({{3}, layout, layout.dtype, workers, kPatience})) {
    for (uint32_t rank = 0; rank < workers; ++rank) {
      workers_.push_back(std::make_unique<FakeGpuWorker>(gpus[0], elems_ * SizeOf(dtype_)));
      EXPECT_TRUE(memory_->AddInput(rank, UniqueFd(), workers_[rank]->Share()).ok());
    }
  }
  ~GpuNode() { memory_.reset(); }
  BucketMemory& memory() { return *memory_; }
  FakeGpuWorker& worker(size_t rank) { return *workers_[rank]; }
  void Make(const std::vector<Floats>& gradients) {
    for (size_t rank = 0; rank < workers_.size(); ++rank) {
      workers_[rank]->Make(Narrowed(gradients[rank], dtype_));
    }
  }
  // Returns the result as the worker's stream finds it.
  Floats Result(uint32_t rank = 0) {
    const auto bytes =
        workers_[rank]->Fetch<std::byte>(memory_->ResultFor(rank), elems_ * SizeOf(dtype_));
    return Widened(bytes.data(), dtype_, elems_);
  }

 private:
  const uint64_t elems_;
  const DType dtype_;
  std::vector<std::unique_ptr<FakeGpuWorker>> workers_;
  std::unique_ptr<BucketMemory> memory_;
};

}  // namespace thalweg
