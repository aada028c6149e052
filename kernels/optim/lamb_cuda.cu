#include "kernels/launch/launch.h"
#include "kernels/optim/granule_sums.h"
#include "kernels/optim/load_store.h"
#include "kernels/optim/optim_launch.h"

namespace thalweg {
namespace {

// A warp has a granule, row after row. A row is 32 adjacent elements, one for each lane, so
// accesses are of one element, and whole sectors wherever the arrays begin. Of each of its sixteen
// sums' elements, two lanes have every other one. They exchange them such that the lower lanes add
// up parameters and the upper ones updates.
struct LambMomentsKernel {
  static constexpr uint32_t kThreads = 256;
  static constexpr uint32_t kWarps = kThreads / 32;
  static constexpr uint32_t kBlocksAtOnce = 4;
  static constexpr uint32_t kRow = 2 * kChains;
  static constexpr uint32_t kRows = 4;  // whose reads are in flight together
  struct Shared {};
  using Args = LambMomentsWork;

  template <class Thread>
  THALWEG_DEVICE static void Run(const Thread& thread, Shared&, const Args& args) {
    if (*args.step.skip != 0) return;
    const OptimTable& table = args.step.table;
    // The gradients that were read last, for their norm, are still in the cache, so it begins
    // there.
    const uint64_t block = thread.Blocks() - 1 - thread.Block();
    const uint64_t number = block * kWarps + thread.Warp();
    if (number >= table.granules) return;
    const Granule granule = GranuleAt(table, number);
    const OptimEntry& tensor = table.entries[granule.tensor];
    const LambPrepared& prepared = args.step.prepared[granule.tensor];
    const void* const params = ElementAt(tensor.param, tensor.param_type, granule.first);
    const void* const grads = ElementAt(tensor.grad, tensor.grad_type, granule.first);
    float* const moments[2] = {tensor.states[0] + granule.first, tensor.states[1] + granule.first};
    double sum = 0;
    WithElement(tensor.param_type, [&]<class Param>() {
      WithElement(tensor.grad_type, [&]<class Grad>() {
        const Arrays<Param, Grad> arrays = {static_cast<const typename Param::Bits*>(params),
                                            static_cast<const typename Grad::Bits*>(grads),
                                            {moments[0], moments[1]}};
        sum = Moments(thread, arrays, prepared.factors, granule.count);
      });
    });
    if (!prepared.is_trusted) return;
    const double total = TotalOfChains(thread, sum);
    if (thread.Lane() == 0) args.param_squares[number] = total;
    if (thread.Lane() == kChains) args.update_squares[number] = total;
  }

  // The arrays of a granule, or of a lane, which has every kRow-th element.
  template <class Param, class Grad>
  struct Arrays {
    const typename Param::Bits* params;
    const typename Grad::Bits* grads;
    float* moments[2];
  };

  // Returns this lane's sum.
  template <class Param, class Grad, class Thread>
  THALWEG_DEVICE static double Moments(const Thread& thread, const Arrays<Param, Grad>& arrays,
                                       const LambFactors factors, uint32_t count) {
    const uint32_t lane = thread.Lane();
    const Arrays<Param, Grad> own = {arrays.params + lane,
                                     arrays.grads + lane,
                                     {arrays.moments[0] + lane, arrays.moments[1] + lane}};
    double sum = 0;
    uint32_t at = 0;
    for (; at + kRows * kRow <= count; at += kRows * kRow) {
      sum = Rows<true>(thread, own, factors, at, count, sum);
    }
    // Of the last rows, some lanes may have less than others.
    const uint32_t left = count > lane ? count - lane : 0;
    if (at < count) sum = Rows<false>(thread, own, factors, at, left, sum);
    return sum;
  }

  // Does kRows rows from element `at` of the granule on; unless kWhole, `count` may end them.
  template <bool kWhole, class Param, class Grad, class Thread>
  THALWEG_DEVICE static double Rows(const Thread& thread, const Arrays<Param, Grad>& own,
                                    const LambFactors& factors, uint32_t at, uint32_t count,
                                    double sum) {
    const auto has = [&](uint32_t row) { return kWhole || at + row * kRow < count; };
    typename Param::Bits params[kRows];
    typename Grad::Bits grads[kRows];
    float moments[2][kRows];
    for (uint32_t r = 0; r < kRows; ++r) {
      params[r] = has(r) ? LoadOne(&own.params[at + r * kRow]) : 0;
    }
    for (uint32_t r = 0; r < kRows; ++r) {
      grads[r] = has(r) ? LoadOne(&own.grads[at + r * kRow]) : 0;
    }
    for (int k = 0; k < 2; ++k) {
      for (uint32_t r = 0; r < kRows; ++r) {
        moments[k][r] = has(r) ? LoadOne(&own.moments[k][at + r * kRow]) : 0;
      }
    }
    for (uint32_t r = 0; r < kRows; ++r) {
      const float param = Param::Widen(params[r]);
      LambMoments(factors, param, Grad::Widen(grads[r]), &moments[0][r], &moments[1][r]);
      const float update = LambUpdate(factors, param, moments[0][r], moments[1][r]);
      if (has(r)) {
        for (int k = 0; k < 2; ++k) StoreOne(moments[k][r], &own.moments[k][at + r * kRow]);
      }
      sum = AddSquares(thread, param, has(r) ? update : 0, sum);
    }
    return sum;
  }

  // Adds the squares of a row to the sums of its lanes, in the order of its elements.
  template <class Thread>
  THALWEG_DEVICE static double AddSquares(const Thread& thread, float param, float update,
                                          double sum) {
    const bool is_lower = thread.Lane() < kChains;
    const float others = thread.ShuffleXor(is_lower ? update : param, kChains);
    sum = AddSquare(is_lower ? param : others, sum);
    return AddSquare(is_lower ? others : update, sum);
  }
};

// This kernel has a block for each tensor. Half of its threads add up parameters, half updates.
struct TrustKernel {
  static constexpr uint32_t kThreads = 2 * kParts;
  struct Shared {
    double parts[2][kParts];
    double updates;
  };
  using Args = TrustWork;

  template <class Thread>
  THALWEG_DEVICE static void Run(const Thread& thread, Shared& shared, const Args& args) {
    LambPrepared& prepared = args.prepared[thread.Block()];
    if (*args.skip != 0 || !prepared.is_trusted) return;
    const OptimEntry& tensor = args.table.entries[thread.Block()];
    const uint32_t half = thread.Index() / kParts;
    const double* const sums = half == 0 ? args.param_squares : args.update_squares;
    const double total =
        TotalOfGranules(thread, thread.Index() % kParts, sums + tensor.first_granule,
                        GranulesOf(tensor.elems), shared.parts[half]);
    if (thread.Index() == kParts) shared.updates = total;
    thread.SyncBlock();
    if (thread.Index() == 0) prepared.rate = TrustedRate(prepared.rate, total, shared.updates);
  }
};

// A block has a granule. It begins with those whose moments were computed last, as they may still
// be in the cache.
struct LambStepKernel {
  static constexpr uint32_t kThreads = 256;
  static constexpr uint32_t kBlocksAtOnce = 6;
  struct Shared {};
  using Args = StepWork<LambPrepared>;

  template <class Thread>
  THALWEG_DEVICE static void Run(const Thread& thread, Shared&, const Args& args) {
    if (*args.skip != 0) return;
    const Granule granule = GranuleAt(args.table, thread.Block());
    const OptimEntry tensor = args.table.entries[granule.tensor];
    const LambPrepared prepared = args.prepared[granule.tensor];
    ForEachPlace(
        thread.Index(), kThreads, tensor.head, granule,
        [&]<bool kPacked>(const ElementPlace& place) { Step<kPacked>(tensor, prepared, place); });
  }

  template <bool kPacked>
  THALWEG_DEVICE static void Step(const OptimEntry& tensor, const LambPrepared& prepared,
                                  const ElementPlace& place) {
    constexpr ElementType kState = ElementType::kFp32;
    const Quad param = Load<kPacked>(tensor.param, tensor.param_type, place);
    const Quad first = Load<kPacked>(tensor.states[0], kState, place);
    const Quad second = Load<kPacked>(tensor.states[1], kState, place);
    float params[kQuad];
    float moments[2][kQuad];
    Widen<kPacked>(param, tensor.param_type, params);
    Widen<kPacked>(first, kState, moments[0]);
    Widen<kPacked>(second, kState, moments[1]);
    for (uint32_t e = 0; e < kQuad; ++e) {
      const float update = LambUpdate(prepared.factors, params[e], moments[0][e], moments[1][e]);
      params[e] = LambStep(prepared.rate, params[e], update);
    }
    StoreParams<kPacked>(tensor, params, place);
  }
};

}  // namespace

LaunchError LaunchLambMoments(CudaStream stream, const LambMomentsWork& work) {
  return Launch<LambMomentsKernel>(
      stream, BlocksFor(work.step.table.granules, LambMomentsKernel::kWarps), work);
}

LaunchError LaunchTrust(CudaStream stream, const TrustWork& work) {
  return Launch<TrustKernel>(stream, work.table.count, work);
}

LaunchError LaunchLambStep(CudaStream stream, const StepWork<LambPrepared>& work) {
  return Launch<LambStepKernel>(stream, work.table.granules, work);
}

}  // namespace thalweg
