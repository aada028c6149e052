#include "client/torch/call_memory.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include "client/torch/collective_tensors.h"
#include "client/torch/tensor.h"

namespace thalweg {

std::span<const std::byte> CallMemory::Given(const at::Tensor& tensor) {
  // The memory of a view may hold the conjugates or negatives of its values.
  return BytesOf(kept_.emplace_back(tensor.cpu().resolve_conj().resolve_neg().contiguous()));
}

std::span<std::byte> CallMemory::Got(const at::Tensor& tensor) {
  at::Tensor target = tensor;
  if (!tensor.is_cpu()) {
    // The caller's stream may still use the tensor, of which the copy at the end knows nothing.
    c10::impl::VirtualGuardImpl(tensor.device().type()).getStream(tensor.device()).synchronize();
  }
  if (!tensor.is_cpu() || !tensor.is_contiguous() || tensor.is_conj() || tensor.is_neg()) {
    target = at::empty(tensor.sizes(), tensor.options().device(at::kCPU));
    copies_.emplace_back(target, tensor);
  }
  return WritableBytesOf(kept_.emplace_back(target));
}

void CallMemory::Attach(CollectiveWork& work, std::function<void()> then) const {
  work.Then([copies = copies_, kept = kept_, then = std::move(then)] {
    for (const auto& [from, to] : copies) {
      const c10::InferenceMode mode(to.is_inference());  // the caller's thread was in it
      const at::NoGradGuard no_grad;                     // InferenceMode sets that, too
      WithoutRepeats(to, to).copy_(WithoutRepeats(from, to));
    }
    if (then != nullptr) then();
  });
}

}  // namespace thalweg
