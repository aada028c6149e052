// Who wants to know that a backward pass is about to add to the gradients of some parameters.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <memory>

namespace thalweg {

// For Python's thread; backward passes may run in others.
class BackwardWatch {
 public:
  BackwardWatch();

  // From now on, for as long as the parameter lives, which must require a gradient. Costs a
  // backward pass next to nothing.
  void Add(const at::Tensor& param);
  // `told` is called before the next gradient of one of the parameters arrives, once, by the thread
  // of the backward pass, which fails if it raises.
  void Arm(pybind11::function told);
  void Disarm();

 private:
  struct State;

  std::shared_ptr<State> state_;
};

}  // namespace thalweg
