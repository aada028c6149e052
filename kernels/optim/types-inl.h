// This header chooses the element types of a tensor once per range and walks over its elements.
// Sources that compile themselves once per Highway target include it, hence the guard that toggles.
#if defined(THALWEG_KERNELS_OPTIM_TYPES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef THALWEG_KERNELS_OPTIM_TYPES_INL_H_
#undef THALWEG_KERNELS_OPTIM_TYPES_INL_H_
#else
#define THALWEG_KERNELS_OPTIM_TYPES_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "core/base/dtype.h"
#include "hwy/highway.h"
#include "kernels/cast/element.h"
#include "kernels/cast/vector-inl.h"
#include "kernels/optim/optim.h"

HWY_BEFORE_NAMESPACE();
namespace thalweg {
namespace HWY_NAMESPACE {

// Calls visit(Element()) with the element type that `type` names: fp32, fp16 or bf16.
template <class Visit>
HWY_INLINE void WithType(DType type, const Visit& visit) {
  if (type == DType::kFloat16) return visit(Fp16());
  if (type == DType::kBFloat16) return visit(BFloat16());
  visit(Fp32());
}

// Calls visit(Param(), Grad()).
template <class Visit>
HWY_INLINE void WithTypes(const OptimTensor& tensor, const Visit& visit) {
  WithType(tensor.param_type, [&](auto param) HWY_ATTR {
    WithType(tensor.grad_type, [&](auto grad) HWY_ATTR { visit(param, grad); });
  });
}

template <class Element>
HWY_INLINE float LoadScalar(const void* array, uint64_t i) {
  return Element::Widen(LoadBits<Element>(array, i));
}

template <class Element>
HWY_INLINE void StoreScalar(float value, void* array, uint64_t i) {
  StoreBits<Element>(Element::Narrow(value), array, i);
}

inline void StoreCopyScalar(const OptimTensor& tensor, float value, uint64_t i) {
  if (tensor.copy == nullptr) return;
  WithType(tensor.copy_type,
           [&](auto copy) HWY_ATTR { StoreScalar<decltype(copy)>(value, tensor.copy, i); });
}

#if THALWEG_VECTORS

template <class Element>
HWY_INLINE const std::byte* Address(const void* array, uint64_t i) {
  return static_cast<const std::byte*>(array) + i * sizeof(typename Element::Bits);
}

template <class Element>
HWY_INLINE std::byte* Address(void* array, uint64_t i) {
  return static_cast<std::byte*>(array) + i * sizeof(typename Element::Bits);
}

template <class D>
HWY_INLINE void StoreCopy(const OptimTensor& tensor, D d, hn::Vec<D> values, uint64_t i) {
  if (tensor.copy == nullptr) return;
  WithType(tensor.copy_type, [&](auto copy) HWY_ATTR {
    StoreVector(copy, d, values, Address<decltype(copy)>(tensor.copy, i));
  });
}

// These are the functions of update_scalar.h on vectors, operation by operation.

template <class D>
HWY_INLINE hn::Vec<D> ScaledGradientVector(D d, float factor, float l2, hn::Vec<D> param,
                                           hn::Vec<D> grad) {
  const auto scaled = hn::Mul(grad, hn::Set(d, factor));
  return l2 != 0 ? hn::MulAdd(param, hn::Set(d, l2), scaled) : scaled;
}

template <class D>
HWY_INLINE hn::Vec<D> SecondMomentVector(D d, float keep, float take, hn::Vec<D> moment,
                                         hn::Vec<D> grad) {
  return hn::MulAdd(hn::Mul(hn::Set(d, take), grad), grad, hn::Mul(moment, hn::Set(d, keep)));
}

#endif  // THALWEG_VECTORS

// Updates elements [first, last) of the tensor of `original`. `Update` has
//   float Scalar(uint64_t i, float param, float grad) const;
//   hn::Vec<D> Vector(D d, uint64_t i, hn::Vec<D> param, hn::Vec<D> grad) const;
// which update the states of element i, or of those from i on, and return the new parameters.
template <class Update>
HWY_INLINE void UpdateElements(const Update& original, uint64_t first, uint64_t last) {
  WithTypes(original.tensor, [&](auto param_type, auto grad_type) HWY_ATTR {
    // They are copies, because stores through the pointers in them could change the original. The
    // tensor is a copy of its own, so that compilers keep its pointers in registers.
    const Update update = original;
    const OptimTensor tensor = original.tensor;
    using Param = decltype(param_type);
    using Grad = decltype(grad_type);
    uint64_t i = first;
#if THALWEG_VECTORS
    const hn::ScalableTag<float> d;
    for (const size_t lanes = hn::Lanes(d); last - i >= lanes; i += lanes) {
      const auto param = LoadVector(param_type, d, Address<Param>(tensor.param, i));
      const auto grad = LoadVector(grad_type, d, Address<Grad>(tensor.grad, i));
      const auto next = update.Vector(d, i, param, grad);
      StoreVector(param_type, d, next, Address<Param>(tensor.param, i));
      StoreCopy(tensor, d, next, i);
    }
#endif
    for (; i < last; ++i) {
      const float next =
          update.Scalar(i, LoadScalar<Param>(tensor.param, i), LoadScalar<Grad>(tensor.grad, i));
      StoreScalar<Param>(next, tensor.param, i);
      StoreCopyScalar(tensor, next, i);
    }
  });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace thalweg
HWY_AFTER_NAMESPACE();

#endif  // THALWEG_KERNELS_OPTIM_TYPES_INL_H_
