// FusedTensors updates the parameters of one group of a torch optimizer on the CPU, in one parallel
// region, with kernels/optim.
#pragma once

#include <cstddef>
#include <cstdint>

#include "client/torch/tensor_group.h"
#include "kernels/optim/factors_scalar.h"

namespace thalweg {

// Thread-compatible. Methods use torch's threads and need not hold Python's lock. All take, from
// the parameters' .grad, the gradients divided by `grad_scale`, and leave out parameters without.
// If the settings have max_grad_norm, `grad_squares` is the sum of the squares of all gradients
// that are clipped together, not divided; otherwise it is not used. Updates return the number of
// parameters that they updated; they throw NotFusable before they change any.
class FusedTensors {
 public:
  // Throws NotFusable unless `group` is on the CPU and has counted steps, and two states (three
  // with AMSGrad) for Adam and LAMB, or a momentum or nothing for SGD, which needs steps only with
  // momentum.
  explicit FusedTensors(TensorGroup group);

  // Throws what a step would throw: with several objects, call it before the first one changes
  // anything.
  void CheckGrads() const { group_.CheckGrads(); }

  size_t Adam(const AdamSettings& settings, double grad_scale, double grad_squares);
  // A parameter's first step uses the gradient as its momentum.
  size_t Sgd(const SgdSettings& settings, double grad_scale, double grad_squares);
  size_t Lamb(const LambSettings& settings, double grad_scale, double grad_squares);

  // Returns the sum of the squares of all gradients, not divided, in float64 and in the order of
  // TotalOfGranules(): the same bits for any number of threads, and on a GPU.
  double GradSquares() const;

 private:
  // Returns the number of the current step; 1 where steps are not counted.
  double NextStep(size_t i) const;
  void Finish(const TensorGroup::Work& work) const;

  const TensorGroup group_;
};

}  // namespace thalweg
