#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/optim/optim.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/optim/lamb_cpu.cc"
#include "hwy/foreach_target.h"  // compiles the rest of this file once per target
#include "hwy/highway.h"
#include "kernels/cast/vector-inl.h"
#include "kernels/optim/types-inl.h"

HWY_BEFORE_NAMESPACE();
namespace thalweg {
namespace HWY_NAMESPACE {

// A tile's elements stay in the first-level cache between their computation and their squaring.
constexpr size_t kTile = 512;

// Squares sums squares in float64, where the squares of float32 neither round nor overflow. It has
// sixteen sums, each of every sixteenth element, for any width of vectors: all processors give the
// same bits.
class Squares {
 public:
  // Adds `n` elements from `first` on. Requires that n is a multiple of kSums, except in the last
  // call.
  template <class Element>
  void Add(const void* array, uint64_t first, size_t n) {
    size_t i = 0;
#if THALWEG_VECTORS
    const size_t whole = n - n % kSums;
    // Vectors are at most half as wide as there are sums: two chains, so that neither waits for its
    // own results.
    using D = hn::CappedTag<double, kSums / 2>;
    const D d;
    const hn::Rebind<float, D> d32;
    const size_t lanes = hn::Lanes(d);
    for (size_t k = 0; k < kSums; k += 2 * lanes) {
      auto sum = hn::LoadU(d, sums_ + k);
      auto next = hn::LoadU(d, sums_ + k + lanes);
      for (size_t j = 0; j < whole; j += kSums) {
        const std::byte* const at = Address<Element>(array, first + j + k);
        const auto value = hn::PromoteTo(d, LoadVector(Element{}, d32, at));
        const auto beside =
            hn::PromoteTo(d, LoadVector(Element{}, d32, Address<Element>(at, lanes)));
        sum = hn::MulAdd(value, value, sum);
        next = hn::MulAdd(beside, beside, next);
      }
      hn::StoreU(sum, d, sums_ + k);
      hn::StoreU(next, d, sums_ + k + lanes);
    }
    i = whole;
#endif
    for (; i < n; ++i) {
      const double value = LoadScalar<Element>(array, first + i);
      sums_[i % kSums] += value * value;
    }
  }

  double Total() const {
    double total = 0;
    for (const double sum : sums_) total += sum;
    return total;
  }

 private:
  static constexpr size_t kSums = 16;
  double sums_[kSums] = {};
};

double GradSquaresForTarget(const OptimTensor& tensor, uint64_t first, uint64_t last) {
  Squares squares;
  WithType(tensor.grad_type, [&](auto grad) HWY_ATTR {
    for (uint64_t i = first; i < last; i += kTile) {
      squares.Add<decltype(grad)>(tensor.grad, i, std::min<uint64_t>(kTile, last - i));
    }
  });
  return squares.Total();
}

template <class Param, class Grad>
class LambWalk {
 public:
  explicit LambWalk(const LambTensor& tensor) : t_(tensor) {}

  // Computes the moments of `n` elements from `first` on; stores parameters and updates in the two
  // arrays.
  void Moments(uint64_t first, size_t n, float* params, float* updates) const {
    size_t i = 0;
#if THALWEG_VECTORS
    const D d;
    for (const size_t lanes = hn::Lanes(d); n - i >= lanes; i += lanes) {
      const V param = LoadVector(Param{}, d, Address<Param>(t_.param, first + i));
      hn::StoreU(param, d, params + i);
      hn::StoreU(MomentsVector(first + i, param), d, updates + i);
    }
#endif
    for (; i < n; ++i) {
      const uint64_t at = first + i;
      params[i] = LoadScalar<Param>(t_.param, at);
      LambMoments(t_.factors, params[i], LoadScalar<Grad>(t_.grad, at), t_.states[0] + at,
                  t_.states[1] + at);
      updates[i] = LambUpdate(t_.factors, params[i], t_.states[0][at], t_.states[1][at]);
    }
  }

  void Step(uint64_t first, uint64_t last) const {
    uint64_t i = first;
#if THALWEG_VECTORS
    const D d;
    for (const size_t lanes = hn::Lanes(d); last - i >= lanes; i += lanes) {
      const V param = LoadVector(Param{}, d, Address<Param>(t_.param, i));
      const V update =
          UpdateVector(param, hn::LoadU(d, t_.states[0] + i), hn::LoadU(d, t_.states[1] + i));
      const V next = hn::MulAdd(update, hn::Set(d, -t_.rate), param);
      StoreVector(Param{}, d, next, Address<Param>(t_.param, i));
      StoreCopy(t_, d, next, i);
    }
#endif
    for (; i < last; ++i) {
      const float param = LoadScalar<Param>(t_.param, i);
      const float update = LambUpdate(t_.factors, param, t_.states[0][i], t_.states[1][i]);
      const float next = LambStep(t_.rate, param, update);
      StoreScalar<Param>(next, t_.param, i);
      StoreCopyScalar(t_, next, i);
    }
  }

 private:
#if THALWEG_VECTORS
  using D = hn::ScalableTag<float>;
  using V = hn::Vec<D>;

  HWY_INLINE V UpdateVector(V param, V first, V second) const {
    const D d;
    const LambFactors& f = t_.factors;
    const V denominator = hn::Add(hn::Sqrt(second), hn::Set(d, f.epsilon));
    const V corrected = hn::Mul(first, hn::Set(d, f.correction));
    return hn::MulAdd(param, hn::Set(d, f.decay), hn::Div(corrected, denominator));
  }

  HWY_INLINE V MomentsVector(uint64_t i, V param) const {
    const D d;
    const LambFactors& f = t_.factors;
    const V grad = ScaledGradientVector(d, f.grad, f.l2, param,
                                        LoadVector(Grad{}, d, Address<Grad>(t_.grad, i)));
    const V first = hn::MulAdd(hn::LoadU(d, t_.states[0] + i), hn::Set(d, f.first_keep),
                               hn::Mul(grad, hn::Set(d, f.first)));
    const V second =
        SecondMomentVector(d, f.second_keep, f.second, hn::LoadU(d, t_.states[1] + i), grad);
    hn::StoreU(first, d, t_.states[0] + i);
    hn::StoreU(second, d, t_.states[1] + i);
    return UpdateVector(param, first, second);
  }
#endif  // THALWEG_VECTORS

  // It is a copy, because stores through the pointers in it could change the original.
  const LambTensor t_;
};

void LambMomentsForTarget(const LambTensor& tensor, uint64_t first, uint64_t last,
                          double* param_squares, double* update_squares) {
  Squares of_params;
  Squares of_updates;
  float params[kTile];
  float updates[kTile];
  WithTypes(tensor, [&](auto param, auto grad) HWY_ATTR {
    const LambWalk<decltype(param), decltype(grad)> walk(tensor);
    for (uint64_t i = first; i < last; i += kTile) {
      const size_t n = std::min<uint64_t>(kTile, last - i);
      walk.Moments(i, n, params, updates);
      if (param_squares == nullptr) continue;
      of_params.Add<Fp32>(params, 0, n);
      of_updates.Add<Fp32>(updates, 0, n);
    }
  });
  if (param_squares == nullptr) return;
  *param_squares = of_params.Total();
  *update_squares = of_updates.Total();
}

void LambStepForTarget(const LambTensor& tensor, uint64_t first, uint64_t last) {
  // This phase reads no gradients, so their type does not matter.
  WithType(tensor.param_type,
           [&](auto param) HWY_ATTR { LambWalk<decltype(param), Fp32>(tensor).Step(first, last); });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace thalweg
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace thalweg {

HWY_EXPORT(GradSquaresForTarget);
HWY_EXPORT(LambMomentsForTarget);
HWY_EXPORT(LambStepForTarget);

namespace {

// Calls visit(first, last, granule) for each granule of a piece.
template <class Visit>
void ForEachGranule(const FlatIndex::Piece& piece, const Visit& visit) {
  uint64_t granule = piece.granule;
  for (uint64_t i = piece.first; i < piece.last; i += FlatIndex::kGranule, ++granule) {
    visit(i, std::min(piece.last, i + FlatIndex::kGranule), granule);
  }
}

}  // namespace

void RunGradSquares(std::span<const OptimTensor> tensors, const FlatIndex& index, uint64_t begin,
                    uint64_t end, double* sums) {
  index.ForEach(begin, end, [&](const FlatIndex::Piece& piece) {
    ForEachGranule(piece, [&](uint64_t first, uint64_t last, uint64_t granule) {
      sums[granule] =
          HWY_DYNAMIC_DISPATCH(GradSquaresForTarget)(tensors[piece.tensor], first, last);
    });
  });
}

void RunLambMoments(std::span<const LambTensor> tensors, const FlatIndex& index, uint64_t begin,
                    uint64_t end, double* param_squares, double* update_squares) {
  index.ForEach(begin, end, [&](const FlatIndex::Piece& piece) {
    ForEachGranule(piece, [&](uint64_t first, uint64_t last, uint64_t granule) {
      HWY_DYNAMIC_DISPATCH(LambMomentsForTarget)
      (tensors[piece.tensor], first, last,
       param_squares == nullptr ? nullptr : param_squares + granule,
       update_squares == nullptr ? nullptr : update_squares + granule);
    });
  });
}

void RunLambStep(std::span<const LambTensor> tensors, const FlatIndex& index, uint64_t begin,
                 uint64_t end) {
  index.ForEach(begin, end, [&](const FlatIndex::Piece& piece) {
    HWY_DYNAMIC_DISPATCH(LambStepForTarget)(tensors[piece.tensor], piece.first, piece.last);
  });
}

}  // namespace thalweg
#endif  // HWY_ONCE
