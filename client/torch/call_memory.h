// CallMemory is what a call of a process group copies from and into.
#pragma once

#include <ATen/ATen.h>

#include <cstddef>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "client/torch/collective_work.h"

namespace thalweg {

// What a call's bytes lie in until it has ended, and what is copied then. Thread-compatible.
class CallMemory {
 public:
  // Returns the bytes of a tensor's values, on the CPU and without gaps.
  std::span<const std::byte> Given(const at::Tensor& tensor);
  // Returns where the values belong that the tensor gets.
  std::span<std::byte> Got(const at::Tensor& tensor);
  // Lets the work keep all of it, and copy results before anybody sees it complete, and then do
  // `then`, if it is not null. A work that fails lets go of it: whoever still copies from it must
  // have this object.
  void Attach(CollectiveWork& work, std::function<void()> then = nullptr) const;

 private:
  std::vector<at::Tensor> kept_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;  // from, to
};

}  // namespace thalweg
