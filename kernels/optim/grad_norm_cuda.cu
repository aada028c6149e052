#include "kernels/cast/element.h"
#include "kernels/launch/launch.h"
#include "kernels/launch/pack.h"
#include "kernels/optim/granule_sums.h"
#include "kernels/optim/load_store.h"
#include "kernels/optim/optim_launch.h"

namespace thalweg {
namespace {

// Sixteen lanes have a granule, each of them one of its sums. The sums take adjacent elements, so
// accesses are of one element, and the lanes together access whole sectors wherever the array
// begins. Each lane has many reads in flight instead.
struct GradSquaresKernel {
  static constexpr uint32_t kThreads = 256;
  static constexpr uint32_t kGranules = kThreads / kChains;
  static constexpr uint32_t kBlocksAtOnce = 4;
  static constexpr uint32_t kAtOnce = 16;
  struct Shared {};
  struct Args {
    OptimTable table;
    double* sums;
  };

  template <class Thread>
  THALWEG_DEVICE static void Run(const Thread& thread, Shared&, const Args& args) {
    const uint64_t number = uint64_t{thread.Block()} * kGranules + thread.Index() / kChains;
    const uint32_t chain = thread.Lane() % kChains;
    double sum = 0;
    if (number < args.table.granules) {
      const Granule granule = GranuleAt(args.table, number);
      const OptimEntry& tensor = args.table.entries[granule.tensor];
      WithElement(tensor.grad_type, [&]<class Element>() {
        const auto* const grads = static_cast<const typename Element::Bits*>(tensor.grad);
        sum = SquaresOf<Element>(grads + granule.first, chain, granule.count);
      });
    }
    const double total = TotalOfChains(thread, sum);
    if (chain == 0 && number < args.table.granules) args.sums[number] = total;
  }

  // Returns the sum of the squares of every sixteenth element from `first` on.
  template <class Element>
  THALWEG_DEVICE static double SquaresOf(const typename Element::Bits* grads, uint32_t first,
                                         uint32_t count) {
    double sum = 0;
    for (uint32_t begin = first; begin < count; begin += kChains * kAtOnce) {
      const auto read = Read<Element>(grads + begin, (count - begin + kChains - 1) / kChains);
      for (uint32_t k = 0; k < kAtOnce; ++k) sum = AddSquare(Element::Widen(read.bits[k]), sum);
    }
    return sum;
  }

  // Elements beyond those that are left are read as zeros: adding them changes nothing.
  template <class Element>
  THALWEG_DEVICE static Pack<Element, kAtOnce> Read(const typename Element::Bits* from,
                                                    uint32_t left) {
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
    const double total =
        TotalOfGranules(thread, thread.Index(), args.sums, args.count, shared.parts);
    if (thread.Index() != 0) return;
    *args.total = total;
    // Squares of finite float32 are far from overflowing float64: only non-finite ones make it so.
    if (args.found_inf != nullptr) *args.found_inf = std::isfinite(total) ? 0.0f : 1.0f;
  }
};

}  // namespace

LaunchError LaunchGradSquares(CudaStream stream, const OptimTable& table, double* sums) {
  return Launch<GradSquaresKernel>(stream, BlocksFor(table.granules, GradSquaresKernel::kGranules),
                                   {table, sums});
}

LaunchError LaunchTotal(CudaStream stream, const TotalWork& work) {
  return Launch<TotalKernel>(stream, 1, work);
}

}  // namespace thalweg
