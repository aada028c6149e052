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

// Elements from `first` on of one tensor. kLargest: with AMSGrad.
template <class Param, class Grad, bool kLargest>
class AdamWalk {
 public:
  explicit AdamWalk(const AdamTensor& tensor) : t_(tensor) {}

  void Run(uint64_t first, uint64_t last) const {
    uint64_t i = first;
#if THALWEG_VECTORS
    const size_t lanes = hn::Lanes(D());
    for (; last - i >= lanes; i += lanes) StepVector(i);
#endif
    for (; i < last; ++i) {
      const float param =
          AdamStep(t_.factors, LoadScalar<Param>(t_.param, i), LoadScalar<Grad>(t_.grad, i),
                   t_.states[0] + i, t_.states[1] + i, kLargest ? t_.states[2] + i : nullptr);
      StoreScalar<Param>(param, t_.param, i);
      StoreCopyScalar(t_, param, i);
    }
  }

 private:
#if THALWEG_VECTORS
  using D = hn::ScalableTag<float>;
  using V = hn::Vec<D>;

  HWY_INLINE void StepVector(uint64_t i) const {
    const D d;
    const AdamFactors& f = t_.factors;
    const V param = LoadVector(Param{}, d, Address<Param>(t_.param, i));
    const V grad = ScaledGradientVector(d, f.grad, f.l2, param,
                                        LoadVector(Grad{}, d, Address<Grad>(t_.grad, i)));
    V first = hn::LoadU(d, t_.states[0] + i);
    const V way = hn::Sub(grad, first);
    first = f.first < 0.5f ? hn::MulAdd(hn::Set(d, f.first), way, first)
                           : hn::MulAdd(hn::Set(d, f.first - 1.0f), way, grad);
    V second = SecondMomentVector(d, f.second_keep, f.second, hn::LoadU(d, t_.states[1] + i), grad);
    hn::StoreU(first, d, t_.states[0] + i);
    hn::StoreU(second, d, t_.states[1] + i);
    if constexpr (kLargest) {
      const V largest = hn::LoadU(d, t_.states[2] + i);
      second = hn::IfThenElse(hn::Or(hn::Gt(largest, second), hn::IsNaN(largest)), largest, second);
      hn::StoreU(second, d, t_.states[2] + i);
    }
    const V denominator = hn::Add(hn::Sqrt(second), hn::Set(d, f.epsilon));
    const V step = hn::Div(hn::Mul(hn::Set(d, -f.step), first), denominator);
    const V next = hn::Add(hn::Mul(param, hn::Set(d, f.decay)), step);
    StoreVector(Param{}, d, next, Address<Param>(t_.param, i));
    StoreCopy(t_, d, next, i);
  }
#endif  // THALWEG_VECTORS

  // By value: stores through the pointers in it could change what it refers to.
  const AdamTensor t_;
};

void AdamForTarget(const AdamTensor& tensor, uint64_t first, uint64_t last) {
  WithTypes(tensor, [&](auto param, auto grad) HWY_ATTR {
    using Param = decltype(param);
    using Grad = decltype(grad);
    if (tensor.states[2] != nullptr) {
      AdamWalk<Param, Grad, true>(tensor).Run(first, last);
    } else {
      AdamWalk<Param, Grad, false>(tensor).Run(first, last);
    }
  });
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
