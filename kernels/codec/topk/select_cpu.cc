#include <algorithm>
#include <array>
#include <cassert>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <vector>

#include "kernels/codec/topk/select.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/codec/topk/select_cpu.cc"
#include "hwy/foreach_target.h"  // compiles the rest of this file once per target
#include "hwy/highway.h"
#include "kernels/cast/element.h"
#include "kernels/cast/vector-inl.h"
#include "kernels/codec/topk/topk_scalar.h"

HWY_BEFORE_NAMESPACE();
namespace thalweg {
namespace HWY_NAMESPACE {
namespace {

void AddElements(const float* values, Feedback feedback, uint64_t begin, uint64_t end,
                 std::vector<IndexedResidual>& kept) {
  for (uint64_t i = begin; i < end; ++i) {
    const float residual = feedback.last[i];
    const float x = values[i] + residual;
    if (!std::isfinite(x)) kept.push_back({static_cast<uint32_t>(i), residual});
    feedback.next[i] = x;
  }
}

void AddResidualForTarget(const float* values, Feedback feedback, uint64_t elems,
                          std::vector<IndexedResidual>& kept) {
  uint64_t i = 0;
#if THALWEG_VECTORS
  const hn::ScalableTag<float> d;
  const auto infinity = hn::Set(d, Fp32::kOverflow);
  for (const size_t lanes = hn::Lanes(d); elems - i >= lanes; i += lanes) {
    const auto x = hn::Add(hn::LoadU(d, values + i), hn::LoadU(d, feedback.last + i));
    if (hn::AllTrue(d, hn::Lt(hn::Abs(x), infinity))) {
      hn::StoreU(x, d, feedback.next + i);
    } else {
      AddElements(values, feedback, i, i + lanes, kept);
    }
  }
#endif
  AddElements(values, feedback, i, elems, kept);
}

// Writes to `indices`, which has room for `elems`, the indices of the elements whose magnitude has
// bits of at least `bound`. Returns how many there are.
uint64_t IndicesForTarget(const float* x, uint64_t elems, uint32_t bound, uint32_t* indices) {
  uint64_t count = 0;
  uint64_t i = 0;
#if THALWEG_VECTORS
  const hn::ScalableTag<float> d;
  const hn::RebindToSigned<decltype(d)> d32;
  const size_t lanes = hn::Lanes(d);
  const auto below = hn::Set(d32, static_cast<int32_t>(bound - 1));
  for (; elems - i >= lanes; i += lanes) {
    const auto magnitude = hn::BitCast(d32, hn::Abs(hn::LoadU(d, x + i)));
    const auto found = hn::Gt(magnitude, below);
    if (hn::AllFalse(d32, found)) continue;
    // There is room for a whole vector: at most as many indices have been written as elements
    // passed.
    const auto index = hn::Iota(d32, static_cast<int32_t>(i));
    count += hn::CompressStore(index, found, d32, reinterpret_cast<int32_t*>(indices + count));
  }
#endif
  for (; i < elems; ++i) {
    indices[count] = static_cast<uint32_t>(i);
    if (MagnitudeBits(x[i]) >= bound) ++count;
  }
  return count;
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace thalweg
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace thalweg {

HWY_EXPORT(AddResidualForTarget);
HWY_EXPORT(IndicesForTarget);

namespace {

// Magnitudes are counted by their upper bits: the exponent and three bits of the fraction.
constexpr uint32_t kBinShift = 20;
constexpr size_t kBins = 2048;
using Histogram = std::array<uint32_t, kBins>;

// The sample is taken in runs of a cache line, evenly spread.
constexpr uint64_t kSampleElems = 4096;
constexpr uint64_t kRunElems = 16;

// Orders elements by magnitude, and the lower index of equal ones first.
uint64_t RankOf(const float* x, uint32_t index) {
  return uint64_t{MagnitudeBits(x[index])} << 32 | ~index;
}
uint32_t IndexOf(uint64_t rank) { return ~static_cast<uint32_t>(rank); }
uint32_t BinOf(uint64_t rank) { return static_cast<uint32_t>(rank >> (32 + kBinShift)); }

std::vector<uint32_t> SampleMagnitudes(const float* x, uint64_t elems) {
  std::vector<uint32_t> sample;
  sample.reserve(kSampleElems);
  const uint64_t stride = std::max(kRunElems, elems / (kSampleElems / kRunElems));
  for (uint64_t run = 0; run < elems && sample.size() < kSampleElems; run += stride) {
    const uint64_t end = std::min(elems, run + kRunElems);
    for (uint64_t i = run; i < end; ++i) sample.push_back(MagnitudeBits(x[i]));
  }
  return sample;
}

// Returns the ranks, by rising index, of a few more elements than the largest `count`, which are
// among them. A sample gives the lower bound; a misleading sample costs another pass, but never an
// element.
std::vector<uint64_t> Candidates(const float* x, uint64_t elems, uint64_t count) {
  std::vector<uint32_t> sample = SampleMagnitudes(x, elems);
  const double expected =
      static_cast<double>(count) / static_cast<double>(elems) * static_cast<double>(sample.size());
  // The rank is four standard deviations above the expected one.
  auto rank = static_cast<uint64_t>(expected + 4 * std::sqrt(expected) + 4);
  const auto indices = std::make_unique_for_overwrite<uint32_t[]>(elems);
  for (;; rank *= 2) {
    uint32_t bound = 1;
    if (rank < sample.size()) {
      const auto at = sample.begin() + static_cast<ptrdiff_t>(rank);
      std::nth_element(sample.begin(), at, sample.end(), std::greater<>());
      bound = std::clamp(*at, 1u, Fp32::kInfinity);
    }
    const uint64_t found = HWY_DYNAMIC_DISPATCH(IndicesForTarget)(x, elems, bound, indices.get());
    if (found < count && bound > 1) continue;
    std::vector<uint64_t> ranks(found);
    std::transform(indices.get(), indices.get() + found, ranks.begin(),
                   [x](uint32_t index) { return RankOf(x, index); });
    return ranks;
  }
}

// A Cut says which candidates are chosen: all in bins above `bin`, and `from_bin` of those in it.
struct Cut {
  uint32_t bin = 0;
  uint64_t from_bin = 0;
};

Cut CutFor(const Histogram& histogram, uint64_t count) {
  uint64_t nonfinite = 0;
  for (size_t bin = Fp32::kInfinity >> kBinShift; bin < kBins; ++bin) nonfinite += histogram[bin];
  const uint64_t wanted = std::max(count, nonfinite);
  uint64_t above = 0;
  uint32_t bin = kBins - 1;
  for (; above + histogram[bin] < wanted; --bin) above += histogram[bin];
  return {bin, wanted - above};
}

}  // namespace

std::vector<IndexedResidual> AddResidual(const float* values, Feedback feedback, uint64_t elems) {
  std::vector<IndexedResidual> kept;
  HWY_DYNAMIC_DISPATCH(AddResidualForTarget)(values, feedback, elems, kept);
  return kept;
}

std::vector<uint32_t> SelectLargest(const float* x, uint64_t elems, uint64_t count) {
  assert(count >= 1);
  if (elems == 0) return {};
  const std::vector<uint64_t> candidates = Candidates(x, elems, count);
  uint64_t least = 0;
  if (candidates.size() > count) {
    Histogram histogram{};
    for (uint64_t rank : candidates) ++histogram[BinOf(rank)];
    const Cut cut = CutFor(histogram, count);
    std::vector<uint64_t> in_bin;
    in_bin.reserve(histogram[cut.bin]);
    std::copy_if(candidates.begin(), candidates.end(), std::back_inserter(in_bin),
                 [&](uint64_t rank) { return BinOf(rank) == cut.bin; });
    const auto last = in_bin.begin() + static_cast<ptrdiff_t>(cut.from_bin - 1);
    std::nth_element(in_bin.begin(), last, in_bin.end(), std::greater<>());
    least = *last;
  }
  std::vector<uint32_t> chosen;
  chosen.reserve(count);
  for (uint64_t rank : candidates) {
    if (rank >= least) chosen.push_back(IndexOf(rank));
  }
  return chosen;
}

}  // namespace thalweg
#endif  // HWY_ONCE
