#include "kernels/launch/launch.h"
#include "kernels/optim/load_store.h"
#include "kernels/optim/optim_launch.h"

namespace thalweg {
namespace {

// A rule says how many states a tensor has at least, whether it may have one more, how many blocks
// a multiprocessor has registers for, and how an element changes. It returns the new parameter.

struct AdamRule {
  using Factors = AdamFactors;
  static constexpr uint32_t kBlocksAtOnce = 4;
  static constexpr int kStates = 2;

  template <int kHas>
  THALWEG_DEVICE static float Step(const Factors& f, float param, float grad, float* first,
                                   float* second, float* largest) {
    return AdamStep(f, param, grad, first, second, kHas == 3 ? largest : nullptr);
  }
};

struct SgdRule {
  using Factors = SgdFactors;
  static constexpr uint32_t kBlocksAtOnce = 5;
  static constexpr int kStates = 0;

  template <int kHas>
  THALWEG_DEVICE static float Step(const Factors& f, float param, float grad, float* momentum,
                                   float*, float*) {
    return SgdStep(f, param, grad, kHas == 1 ? momentum : nullptr);
  }
};

// A block has a granule. Types are checked once for four elements rather than being template
// parameters: one launch has tensors of all kinds.
template <class Rule>
struct StepKernel {
  static constexpr uint32_t kThreads = 256;
  static constexpr uint32_t kBlocksAtOnce = Rule::kBlocksAtOnce;
  struct Shared {};
  using Args = StepWork<typename Rule::Factors>;

  template <class Thread>
  THALWEG_DEVICE static void Run(const Thread& thread, Shared&, const Args& args) {
    if (*args.skip != 0) return;
    const Granule granule = GranuleAt(args.table, thread.Block());
    if (args.table.entries[granule.tensor].states[Rule::kStates] != nullptr) {
      StepGranule<Rule::kStates + 1>(thread, args, granule);
    } else {
      StepGranule<Rule::kStates>(thread, args, granule);
    }
  }

  template <int kHas, class Thread>
  THALWEG_DEVICE static void StepGranule(const Thread& thread, const Args& args,
                                         const Granule& granule) {
    // These are copies, because stores through the pointers in them could change the originals.
    const OptimEntry tensor = args.table.entries[granule.tensor];
    const typename Rule::Factors factors = args.prepared[granule.tensor];
    ForEachPlace(thread.Index(), kThreads, tensor.head, granule,
                 [&]<bool kPacked>(const ElementPlace& place) {
                   StepQuad<kHas, kPacked>(tensor, factors, place);
                 });
  }

  template <int kHas, bool kPacked>
  THALWEG_DEVICE static void StepQuad(const OptimEntry& tensor,
                                      const typename Rule::Factors& factors,
                                      const ElementPlace& place) {
    const Quad param = Load<kPacked>(tensor.param, tensor.param_type, place);
    const Quad grad = Load<kPacked>(tensor.grad, tensor.grad_type, place);
    Quad loaded[kHas > 0 ? kHas : 1];
    for (int k = 0; k < kHas; ++k) {
      loaded[k] = Load<kPacked>(tensor.states[k], ElementType::kFp32, place);
    }
    float states[3][kQuad];
    for (int k = 0; k < kHas; ++k) Widen<kPacked>(loaded[k], ElementType::kFp32, states[k]);
    float params[kQuad];
    float grads[kQuad];
    Widen<kPacked>(param, tensor.param_type, params);
    Widen<kPacked>(grad, tensor.grad_type, grads);
    for (uint32_t e = 0; e < kQuad; ++e) {
      params[e] = Rule::template Step<kHas>(factors, params[e], grads[e], &states[0][e],
                                            &states[1][e], &states[2][e]);
    }
    for (int k = 0; k < kHas; ++k) {
      Store<kPacked>(states[k], ElementType::kFp32, place, tensor.states[k]);
    }
    StoreParams<kPacked>(tensor, params, place);
  }
};

template <class Rule>
LaunchError LaunchStep(CudaStream stream, const StepWork<typename Rule::Factors>& work) {
  return Launch<StepKernel<Rule>>(stream, work.table.granules, work);
}

}  // namespace

LaunchError LaunchAdamStep(CudaStream stream, const StepWork<AdamFactors>& work) {
  return LaunchStep<AdamRule>(stream, work);
}

LaunchError LaunchSgdStep(CudaStream stream, const StepWork<SgdFactors>& work) {
  return LaunchStep<SgdRule>(stream, work);
}

}  // namespace thalweg
