#include <cstddef>
#include <cstdint>

#include "kernels/optim/optim.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/optim/adam_cpu.cc"
#include "hwy/foreach_target.h"  // compiles the rest of this file once per target
#include "hwy/highway.h"
#include "kernels/cast/vector-inl.h"
#include "kernels/optim/types-inl.h"

HWY_BEFORE_NAMESPACE();
namespace thalweg {
namespace HWY_NAMESPACE {

// The update of one tensor's elements. kLargest means AMSGrad.
template <bool kLargest>
struct AdamUpdate {
  const AdamTensor tensor;

  HWY_INLINE float Scalar(uint64_t i, float param, float grad) const {
    return AdamStep(tensor.factors, param, grad, tensor.states[0] + i, tensor.states[1] + i,
                    kLargest ? tensor.states[2] + i : nullptr);
  }

#if THALWEG_VECTORS
  template <class D, class V = hn::Vec<D>>
  HWY_INLINE V Vector(D d, uint64_t i, V param, V scaled_grad) const {
    const AdamFactors& f = tensor.factors;
    const V grad = ScaledGradientVector(d, f.grad, f.l2, param, scaled_grad);
    V first = hn::LoadU(d, tensor.states[0] + i);
    const V way = hn::Sub(grad, first);
    first = f.first < 0.5f ? hn::MulAdd(hn::Set(d, f.first), way, first)
                           : hn::MulAdd(hn::Set(d, f.first - 1.0f), way, grad);
    V second =
        SecondMomentVector(d, f.second_keep, f.second, hn::LoadU(d, tensor.states[1] + i), grad);
    hn::StoreU(first, d, tensor.states[0] + i);
    hn::StoreU(second, d, tensor.states[1] + i);
    if constexpr (kLargest) {
      const V largest = hn::LoadU(d, tensor.states[2] + i);
      second = hn::IfThenElse(hn::Or(hn::Gt(largest, second), hn::IsNaN(largest)), largest, second);
      hn::StoreU(second, d, tensor.states[2] + i);
    }
    const V denominator = hn::Add(hn::Sqrt(second), hn::Set(d, f.epsilon));
    const V step = hn::Div(hn::Mul(hn::Set(d, -f.step), first), denominator);
    return hn::Add(hn::Mul(param, hn::Set(d, f.decay)), step);
  }
#endif  // THALWEG_VECTORS
};

void AdamForTarget(const AdamTensor& tensor, uint64_t first, uint64_t last) {
  if (tensor.states[2] != nullptr) {
    UpdateElements(AdamUpdate<true>{tensor}, first, last);
  } else {
    UpdateElements(AdamUpdate<false>{tensor}, first, last);
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace thalweg
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace thalweg {

HWY_EXPORT(AdamForTarget);

uint64_t StepBytes(const OptimTensor& tensor) {
  uint64_t bytes = 2 * SizeOf(tensor.param_type) + SizeOf(tensor.grad_type);
  for (const float* state : tensor.states) {
    if (state != nullptr) bytes += 2 * sizeof(float);
  }
  return tensor.copy == nullptr ? bytes : bytes + SizeOf(tensor.copy_type);
}

void RunAdam(std::span<const AdamTensor> tensors, const FlatIndex& index, uint64_t begin,
             uint64_t end) {
  index.ForEach(begin, end, [&](const FlatIndex::Piece& piece) {
    HWY_DYNAMIC_DISPATCH(AdamForTarget)(tensors[piece.tensor], piece.first, piece.last);
  });
}

}  // namespace thalweg
#endif  // HWY_ONCE
