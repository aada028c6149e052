#include "kernels/launch/combine.h"
#include "kernels/launch/launch.h"
#include "kernels/reduce/norm_launch.h"

namespace thalweg {
namespace {

struct SquaredNormKernel {
  static constexpr uint32_t kThreads = 256;
  struct Shared {
    double warps[kThreads / 32];
  };
  using Args = NormWork;

  template <class Thread>
  THALWEG_DEVICE static void Run(const Thread& thread, Shared& shared, const Args& args) {
    const uint64_t begin = uint64_t{thread.Block()} * kNormStretch;
    const uint64_t end = begin + kNormStretch < args.elems ? begin + kNormStretch : args.elems;
    double sum = 0;
    for (uint64_t i = begin + thread.Index(); i < end; i += kThreads) {
      const double value =
          static_cast<double>(args.a[i]) + (args.b == nullptr ? 0.0 : double{args.b[i]});
      sum += value * value;
    }
    const double all = ScanBlock<kThreads>(thread, shared.warps, sum, SumOf()).all;
    if (thread.Index() == 0) args.partials[thread.Block()] = all;
  }
};

}  // namespace

LaunchError LaunchSquaredNorm(CudaStream stream, const NormWork& work) {
  return Launch<SquaredNormKernel>(stream, BlocksFor(work.elems, kNormStretch), work);
}

}  // namespace thalweg
