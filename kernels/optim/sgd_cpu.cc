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

template <class Param, class Grad, bool kMomentum>
class SgdWalk {
 public:
  explicit SgdWalk(const SgdTensor& tensor) : t_(tensor) {}

  void Run(uint64_t first, uint64_t last) const {
    uint64_t i = first;
#if THALWEG_VECTORS
    const size_t lanes = hn::Lanes(D());
    for (; last - i >= lanes; i += lanes) StepVector(i);
#endif
    for (; i < last; ++i) {
      const float param =
          SgdStep(t_.factors, LoadScalar<Param>(t_.param, i), LoadScalar<Grad>(t_.grad, i),
                  kMomentum ? t_.states[0] + i : nullptr);
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
    const SgdFactors& f = t_.factors;
    const V param = LoadVector(Param{}, d, Address<Param>(t_.param, i));
    V grad = ScaledGradientVector(d, f.grad, f.l2, param,
                                  LoadVector(Grad{}, d, Address<Grad>(t_.grad, i)));
    if constexpr (kMomentum) {
      const V momentum = hn::MulAdd(hn::LoadU(d, t_.states[0] + i), hn::Set(d, f.keep),
                                    hn::Mul(grad, hn::Set(d, f.take)));
      hn::StoreU(momentum, d, t_.states[0] + i);
      grad = f.nesterov ? hn::MulAdd(momentum, hn::Set(d, f.momentum), grad) : momentum;
    }
    const V next = hn::MulAdd(grad, hn::Set(d, -f.lr), param);
    StoreVector(Param{}, d, next, Address<Param>(t_.param, i));
    StoreCopy(t_, d, next, i);
  }
#endif  // THALWEG_VECTORS

  // By value: stores through the pointers in it could change what it refers to.
  const SgdTensor t_;
};

void SgdForTarget(const SgdTensor& tensor, uint64_t first, uint64_t last) {
  WithTypes(tensor, [&](auto param, auto grad) HWY_ATTR {
    using Param = decltype(param);
    using Grad = decltype(grad);
    if (tensor.states[0] != nullptr) {
      SgdWalk<Param, Grad, true>(tensor).Run(first, last);
    } else {
      SgdWalk<Param, Grad, false>(tensor).Run(first, last);
    }
  });
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
