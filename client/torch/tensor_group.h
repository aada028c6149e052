// The parameters of one group of a torch optimizer with their gradients and state, as kernels/optim
// takes them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <vector>

#include "kernels/optim/optim.h"

namespace thalweg {

// What the kernels cannot update. Nothing has been changed when it is thrown.
class NotFusable : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Throws NotFusable unless parameters and gradients are dense fp32, fp16 or bf16, and all on one
// device: the CPU or a GPU.
void CheckFusable(const std::vector<at::Tensor>& params);

// Thread-compatible.
class TensorGroup {
 public:
  // states[k][i] is state k of params[i], fp32 and of its shape; steps[i] the number of steps it
  // has done, one number; `steps` may be empty. copies[i], of the shape of params[i], gets what it
  // becomes, rounded; `copies` may be empty. Throws NotFusable.
  TensorGroup(std::vector<at::Tensor> params, std::vector<std::vector<at::Tensor>> states,
              std::vector<at::Tensor> steps, std::vector<std::optional<at::Tensor>> copies);

  // From now on parameters that have a copy are masters: their gradients are those of the copies,
  // which are 2^exponent times theirs. Null: all have their own.
  void UseGradsOfCopies(std::optional<int32_t> exponent) { copies_exponent_ = exponent; }

  // The CPU for a group without parameters.
  at::Device device() const { return device_; }
  const std::vector<at::Tensor>& steps() const { return steps_; }

  // Throws what Gather() would.
  void CheckGrads() const;

  // A tensor copied to lie in memory as its parameter does, and where it goes back.
  struct Moved {
    at::Tensor original;
    at::Tensor laid;
  };
  // The parameters that have gradients: tensors[j] is the one with number which[j].
  struct Work {
    std::vector<OptimTensor> tensors;
    std::vector<size_t> which;
    std::vector<at::Tensor> keep_alive;
    std::vector<Moved> moved;
  };
  // What does not lie in memory as its parameter does is copied. Throws NotFusable.
  Work Gather() const;
  // After an update of them: copies back, and tells autograd.
  void Finish(const Work& work) const;

 private:
  bool HasGradOfCopy(size_t i) const;
  // The gradient for params_[i], checked; undefined when it has none.
  at::Tensor Grad(size_t i) const;

  const std::vector<at::Tensor> params_;
  const std::vector<std::vector<at::Tensor>> states_;
  const std::vector<at::Tensor> steps_;
  const std::vector<std::optional<at::Tensor>> copies_;
  const at::Device device_;
  std::optional<int32_t> copies_exponent_;
};

}  // namespace thalweg
