// This header has the arithmetic of the fold, one element at a time: reduce.h defines what it
// computes.
#pragma once

#include "kernels/cast/element.h"
#include "kernels/launch/host_device.h"

namespace thalweg {

// The first summand is a product alone, so that −0 stays −0.
template <class In>
THALWEG_HD inline typename In::Accumulator FoldFirst(float weight, typename In::Bits bits) {
  return static_cast<typename In::Accumulator>(weight) * In::WidenNumber(bits);
}

template <class In>
THALWEG_HD inline typename In::Accumulator FoldNext(float weight, typename In::Bits bits,
                                                    typename In::Accumulator sum) {
  return Fma(static_cast<typename In::Accumulator>(weight), In::WidenNumber(bits), sum);
}

// Replaces every NaN by the same one: processors differ in which of several NaNs a fused
// multiply-add passes on, and in the sign of a new one.
template <class Out>
THALWEG_HD inline typename Out::Bits SettleNaN(typename Out::Bits bits) {
  return (bits & Out::kMagnitude) > Out::kInfinity ? Out::kNan : bits;
}

template <class Out, class Accumulator>
THALWEG_HD inline typename Out::Bits FoldLast(Accumulator mean) {
  return SettleNaN<Out>(Out::NarrowNumber(mean));
}

}  // namespace thalweg
