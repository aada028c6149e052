#include <cstddef>
#include <cstdint>

#include "kernels/optim/optim.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/optim/sgd_cpu.cc"
#include "hwy/foreach_target.h"  // compiles the rest of this file once per target
#include "hwy/highway.h"
#include "kernels/cast/vector-inl.h"
#include "kernels/optim/types-inl.h"

HWY_BEFORE_NAMESPACE();
namespace thalweg {
namespace HWY_NAMESPACE {

// The update of one tensor's elements, with momentum or without.
template <bool kMomentum>
struct SgdUpdate {
  const SgdTensor tensor;

  HWY_INLINE float Scalar(uint64_t i, float param, float grad) const {
    return SgdStep(tensor.factors, param, grad, kMomentum ? tensor.states[0] + i : nullptr);
  }

#if THALWEG_VECTORS
  template <class D, class V = hn::Vec<D>>
  HWY_INLINE V Vector(D d, uint64_t i, V param, V scaled_grad) const {
    const SgdFactors& f = tensor.factors;
    V grad = ScaledGradientVector(d, f.grad, f.l2, param, scaled_grad);
    if constexpr (kMomentum) {
      const V momentum = hn::MulAdd(hn::LoadU(d, tensor.states[0] + i), hn::Set(d, f.keep),
                                    hn::Mul(grad, hn::Set(d, f.take)));
      hn::StoreU(momentum, d, tensor.states[0] + i);
      grad = f.nesterov ? hn::MulAdd(momentum, hn::Set(d, f.momentum), grad) : momentum;
    }
    return hn::MulAdd(grad, hn::Set(d, -f.lr), param);
  }
#endif  // THALWEG_VECTORS
};

void SgdForTarget(const SgdTensor& tensor, uint64_t first, uint64_t last) {
  if (tensor.states[0] != nullptr) {
    UpdateElements(SgdUpdate<true>{tensor}, first, last);
  } else {
    UpdateElements(SgdUpdate<false>{tensor}, first, last);
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace thalweg
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace thalweg {

HWY_EXPORT(SgdForTarget);

void RunSgd(std::span<const SgdTensor> tensors, const FlatIndex& index, uint64_t begin,
            uint64_t end) {
  index.ForEach(begin, end, [&](const FlatIndex::Piece& piece) {
    HWY_DYNAMIC_DISPATCH(SgdForTarget)(tensors[piece.tensor], piece.first, piece.last);
  });
}

}  // namespace thalweg
#endif  // HWY_ONCE
