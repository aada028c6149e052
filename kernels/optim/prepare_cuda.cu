#include "kernels/launch/launch.h"
#include "kernels/optim/optim_launch.h"

namespace thalweg {
namespace {

THALWEG_DEVICE inline AdamFactors Prepare(const AdamSettings& s, double step, double grad) {
  return FactorsOf(s, BiasCorrectionsAt(s, step), grad);
}

THALWEG_DEVICE inline SgdFactors Prepare(const SgdSettings& s, double step, double grad) {
  return FactorsOf(s, step == 1, grad);
}

THALWEG_DEVICE inline LambPrepared Prepare(const LambSettings& s, double step, double grad) {
  return {FactorsOf(s, BiasCorrectionsAt(s, step), grad), static_cast<float>(RateOf(s)),
          s.trust_ratio};
}

// This is a separate kernel with a thread for each tensor. Steps must be counted after all blocks
// have read them, which blocks of the update could only know by waiting for each other. And
// computing a power in float64 for every piece of a tensor would take a block longer than the
// smaller pieces do.
template <class Settings, class Prepared>
struct PrepareKernel {
  static constexpr uint32_t kThreads = 256;
  struct Shared {};
  using Args = PrepareWork<Settings, Prepared>;

  template <class Thread>
  THALWEG_DEVICE static void Run(const Thread& thread, Shared&, const Args& args) {
    const PrepareInputs& inputs = args.inputs;
    const bool skip = inputs.found_inf != nullptr && *inputs.found_inf != 0;
    const uint64_t i = uint64_t{thread.Block()} * kThreads + thread.Index();
    if (i == 0) *args.skip = skip ? 1 : 0;
    if (skip || i >= args.table.count) return;
    const double unscale = inputs.grad_scale == nullptr ? 1.0 : 1.0 / double{*inputs.grad_scale};
    const double squares = inputs.grad_squares == nullptr ? 0.0 : *inputs.grad_squares;
    const OptimEntry& tensor = args.table.entries[i];
    const Settings settings = args.settings[tensor.group];
    double step = 0;
    if (tensor.step != nullptr) {
      step = double{*tensor.step} + 1;
      *tensor.step = static_cast<float>(step);
    }
    args.prepared[i] = Prepare(settings, step, GradFactorOf(settings, unscale, squares));
  }
};

}  // namespace

template <class Settings, class Prepared>
LaunchError LaunchPrepare(CudaStream stream, const PrepareWork<Settings, Prepared>& work) {
  using Kernel = PrepareKernel<Settings, Prepared>;
  return Launch<Kernel>(stream, BlocksFor(work.table.count, Kernel::kThreads), work);
}

template LaunchError LaunchPrepare(CudaStream, const PrepareWork<AdamSettings, AdamFactors>&);
template LaunchError LaunchPrepare(CudaStream, const PrepareWork<SgdSettings, SgdFactors>&);
template LaunchError LaunchPrepare(CudaStream, const PrepareWork<LambSettings, LambPrepared>&);

}  // namespace thalweg
