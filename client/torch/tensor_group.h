// TensorGroup holds the parameters of one group of a torch optimizer with their gradients and
// state, in the form that kernels/optim takes.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <optional>
#include <stdexcept>
#include <vector>

#include "kernels/optim/optim.h"

namespace thalweg {

// NotFusable is thrown for what the kernels cannot update. Nothing has been changed when it is
// thrown.
class NotFusable : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Throws NotFusable unless parameters and gradients are dense fp32, fp16 or bf16, and all on one
// device: the CPU or a GPU.
void CheckFusable(const std::vector<at::Tensor>& params);

// Immutable, apart from the contents of the tensors.
class TensorGroup {
 public:
  // states[k][i] is state k of params[i], fp32 and of its shape; steps[i] is the number of steps it
  // has done, one number; `steps` may be empty. copies[i], of the shape of params[i], receives its
  // rounded new values; `copies` may be empty. Throws NotFusable.
  TensorGroup(std::vector<at::Tensor> params, std::vector<std::vector<at::Tensor>> states,
              std::vector<at::Tensor> steps, std::vector<std::optional<at::Tensor>> copies);

  // Returns the CPU for a group without parameters.
  at::Device device() const { return device_; }
  const std::vector<at::Tensor>& steps() const { return steps_; }

  // Throws what Gather() would throw.
  void CheckGrads() const;

  // A Moved is a tensor copied into its parameter's memory order, and the original to copy back to.
  struct Moved {
    at::Tensor original;
    at::Tensor laid;
  };
  // A Work is the parameters that have gradients: tensors[j] has number which[j].
  struct Work {
    std::vector<OptimTensor> tensors;
    std::vector<size_t> which;
    std::vector<at::Tensor> keep_alive;
    std::vector<Moved> moved;
  };
  // Gathers the tensors; those that lie in another memory order than their parameter are copied.
  // Throws NotFusable.
  Work Gather() const;
  // Copies back after an update of the tensors, and tells autograd.
  void Finish(const Work& work) const;

 private:
  // Throws NotFusable unless params_[i] is still what the kernels update, with gradient, state and
  // copy of its shape.
  void CheckMember(size_t i) const;
  // Returns the gradient of params_[i], which is checked; undefined when it has none.
  at::Tensor Grad(size_t i) const;

  const std::vector<at::Tensor> params_;
  const std::vector<std::vector<at::Tensor>> states_;
  const std::vector<at::Tensor> steps_;
  const std::vector<std::optional<at::Tensor>> copies_;
  const at::Device device_;
};

}  // namespace thalweg
