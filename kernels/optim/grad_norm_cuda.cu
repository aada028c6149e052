#include "kernels/cast/element.h"
#include "kernels/launch/launch.h"
#include "kernels/launch/pack.h"
#include "kernels/optim/granule_sums.h"
#include "kernels/optim/optim_launch.h"

namespace thalweg {
namespace {

// Sixteen lanes have a granule, each of them one of its sums. The sums take adjacent elements, so
// accesses are of one element, and the lanes together access whole sectors wherever the array
// begins. Each lane has many reads in flight instead.
struct GradSquaresKernel {
  static constexpr uint32_t kThreads = 256;
  static constexpr uint32_t kWarps = kThreads / 32;
  static constexpr uint32_t kBlocksAtOnce = 4;
  static constexpr uint32_t kAtOnce = 16;
  struct Shared {};
  struct Args {
    OptimTable table;
    double* sums;
  };

  template <class Thread>
  THALWEG_DEVICE static void Run(const Thread& thread, Shared&, const Args& args) {
    const uint64_t warp = uint64_t{thread.Block()} * kWarps + thread.Warp();
    const uint32_t half = thread.Lane() / kChains;
    const uint32_t chain = thread.Lane() % kChains;
    ForEachPieceOf(args.table, warp, uint64_t{thread.Blocks()} * kWarps,
                   [&](const FlatPiece& piece) {
                     const OptimEntry& tensor = args.table.entries[piece.tensor];
                     for (uint64_t begin = piece.first; begin < piece.last; begin += 2 * kGranule) {
                       const uint64_t first = begin + half * kGranule;
                       const uint64_t after = first + kGranule;
                       const uint64_t last = after < piece.last ? after : piece.last;
                       const double total = TotalOfChains(
                           thread, SquaresOf(tensor.grad, tensor.grad_type, first + chain, last));
                       if (chain == 0 && first < last) {
                         args.sums[piece.granule + (first - piece.first) / kGranule] = total;
                       }
                     }
                   });
  }

  // Returns the squares of every sixteenth element from `first` on.
  THALWEG_DEVICE static double SquaresOf(const void* grad, ElementType type, uint64_t first,
                                         uint64_t last) {
    if (type == ElementType::kFp32) return SquaresOf<Fp32>(grad, first, last);
    if (type == ElementType::kFp16) return SquaresOf<Fp16>(grad, first, last);
    return SquaresOf<BFloat16>(grad, first, last);
  }

  template <class Element>
  THALWEG_DEVICE static double SquaresOf(const void* grad, uint64_t first, uint64_t last) {
    double sum = 0;
    for (uint64_t begin = first; begin < last; begin += uint64_t{kChains} * kAtOnce) {
      const auto read = Read<Element>(grad, begin, last);
      for (uint32_t k = 0; k < kAtOnce; ++k) sum = AddSquare(Element::Widen(read.bits[k]), sum);
    }
    return sum;
  }

  // Elements beyond the end are read as zeros: adding them changes nothing.
  template <class Element>
  THALWEG_DEVICE static Pack<Element, kAtOnce> Read(const void* grad, uint64_t first,
                                                    uint64_t last) {
    const auto* const from = static_cast<const typename Element::Bits*>(grad) + first;
    const uint64_t left = (last - first + kChains - 1) / kChains;
    Pack<Element, kAtOnce> read;
    if (left >= kAtOnce) {
      for (uint32_t k = 0; k < kAtOnce; ++k) read.bits[k] = from[k * kChains];
    } else {
      for (uint32_t k = 0; k < kAtOnce; ++k) read.bits[k] = k < left ? from[k * kChains] : 0;
    }
    return read;
  }
};

struct TotalKernel {
  static constexpr uint32_t kThreads = kParts;
  struct Shared {
    double parts[kParts];
  };
  using Args = TotalWork;

  template <class Thread>
  THALWEG_DEVICE static void Run(const Thread& thread, Shared& shared, const Args& args) {
    const double total = TotalOfGranules(thread, args.sums, args.count, shared.parts);
    if (thread.Index() != 0) return;
    *args.total = total;
    // Squares of finite float32 are far from overflowing float64: only non-finite ones make it so.
    if (args.found_inf != nullptr) *args.found_inf = std::isfinite(total) ? 0.0f : 1.0f;
  }
};

}  // namespace

LaunchError LaunchGradSquares(CudaStream stream, const OptimTable& table, double* sums) {
  return LaunchResident<GradSquaresKernel>(
      stream, BlocksFor(table.granules, GradSquaresKernel::kWarps), {table, sums});
}

LaunchError LaunchTotal(CudaStream stream, const TotalWork& work) {
  return Launch<TotalKernel>(stream, 1, work);
}

}  // namespace thalweg
