// The parameters of one group of a torch optimizer, with their state, updated in one parallel
// region by kernels/optim.
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

// Throws NotFusable unless parameters and gradients are dense fp32, fp16 or bf16 on the CPU.
void CheckFusable(const std::vector<at::Tensor>& params);

struct AdamOptions {
  double lr = 0;
  double beta1 = 0;
  double beta2 = 0;
  double epsilon = 0;
  double weight_decay = 0;
  bool decoupled = false;  // AdamW
  bool bias_correction = true;
};

struct SgdOptions {
  double lr = 0;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;
};

struct LambOptions {
  AdamOptions adam;
  bool grad_averaging = true;
  bool trust_ratio = true;
};

// Thread-compatible. Methods use torch's threads and need not hold Python's lock. All take, from
// the parameters' .grad, the gradients times `grad_factor`, and leave out parameters without. They
// return how many parameters they updated. What does not lie in memory as its parameter does is
// copied first, and copied back.
class FusedTensors {
 public:
  // states[k][i] is state k of params[i], fp32 and of its shape; steps[i] its number of steps, one
  // number. `steps` is empty for SGD, whose states are the momentum or none. copies[i], of the
  // shape of params[i], gets what it becomes, rounded; `copies` may be empty. Throws NotFusable for
  // parameters other than dense fp32, fp16 or bf16 on the CPU.
  FusedTensors(std::vector<at::Tensor> params, std::vector<std::vector<at::Tensor>> states,
               std::vector<at::Tensor> steps, std::vector<std::optional<at::Tensor>> copies);

  // Throws what a step would: with several objects, before the first one changes anything.
  void CheckGrads() const;

  size_t Adam(const AdamOptions& options, double grad_factor);
  // fresh[i]: params[i] has no momentum yet, its state is zeros.
  size_t Sgd(const SgdOptions& options, const std::vector<bool>& fresh, double grad_factor);
  size_t Lamb(const LambOptions& options, double grad_factor);

  // The sum of the squares of all gradients, in float64 and in an order of its own: the same bits
  // whatever the number of threads.
  double GradSquares() const;

 private:
  // A tensor copied to lie as its parameter does, and where it goes back.
  struct Moved {
    at::Tensor original;
    at::Tensor laid;
  };
  // The parameters that have gradients: tensors[j] is params_[which[j]].
  template <class Tensor>
  struct Work {
    std::vector<Tensor> tensors;
    std::vector<size_t> which;
    std::vector<at::Tensor> keep_alive;
    std::vector<Moved> moved;
    FlatIndex index;
  };

  template <class Tensor>
  Work<Tensor> Gather() const;
  template <class Tensor>
  void Finish(const Work<Tensor>& work) const;
  // The gradient of params_[i], checked; undefined when it has none.
  at::Tensor Grad(size_t i) const;
  // The number of the step that is being done.
  double NextStep(size_t i) const;

  const std::vector<at::Tensor> params_;
  const std::vector<std::vector<at::Tensor>> states_;
  const std::vector<at::Tensor> steps_;
  const std::vector<std::optional<at::Tensor>> copies_;
};

}  // namespace thalweg
