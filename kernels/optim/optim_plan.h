// OptimPlan describes the tensors that an optimizer updates on a GPU, in the form that its kernels
// read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/optim/optim.h"

namespace thalweg {

// All pointers are device memory, aligned to their elements.
struct DeviceTensor : OptimTensor {
  // The number of steps done; the kernels count it. Null: not counted.
  float* step = nullptr;
  uint32_t group = 0;  // number of the group whose settings apply
};

// A plan must be made again when pointers change. It is immutable and thread-safe.
class OptimPlan {
 public:
  // Makes a plan. InvalidArgument names a tensor whose types are not fp32, fp16 or bf16, or that
  // has elements and no parameter or gradient, or an array that is not aligned to its elements.
  static absl::StatusOr<OptimPlan> Make(std::span<const DeviceTensor> tensors);

  // Returns what the kernels read; copy it to device memory at a multiple of 16 bytes, unless the
  // same bytes are already there.
  std::span<const std::byte> table() const { return table_; }
  // Returns how much device memory a step uses, at a multiple of 16 bytes.
  uint64_t workspace_bytes() const;

  // Return how many states all tensors with elements have, and whether the steps of all are
  // counted.
  uint32_t states() const { return states_; }
  bool counts_steps() const { return counts_steps_; }

  // These are for kernels/optim.
  uint64_t tensors() const { return tensors_; }
  uint64_t granules() const { return granules_; }

 private:
  OptimPlan() = default;
  void Add(const DeviceTensor& tensor);

  std::vector<std::byte> table_;
  uint64_t tensors_ = 0;
  uint64_t granules_ = 0;
  uint32_t states_ = 3;
  bool counts_steps_ = true;
};

}  // namespace thalweg
