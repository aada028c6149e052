#include "kernels/launch/launch.h"
#include "kernels/optim/granule_sums.h"
#include "kernels/optim/load_store.h"
#include "kernels/optim/optim_launch.h"

namespace thalweg {
namespace {

// All warps but the last compute the moments of a tile. The last adds up the squares of the
// previous tile meanwhile: each of its lanes has one sum, whose additions follow each other.
struct LambMomentsKernel {
  static constexpr uint32_t kWorkers = 256;
  static constexpr uint32_t kThreads = kWorkers + 32;
  static constexpr uint32_t kTile = 2 * kWorkers * kQuad;
  static_assert(kGranule % kTile == 0 && kTile % kChains == 0);

  // The elements of a chain are contiguous, with a gap after them, such that neither writers nor
  // readers have many conflicts in one bank.
  static constexpr uint32_t kChainElems = kTile / kChains + 1;
  struct Squared {
    float params[kChains * kChainElems];
    float updates[kChains * kChainElems];
  };
  struct Shared {
    Squared tiles[2];
  };
  using Args = LambMomentsWork;

  THALWEG_DEVICE static uint32_t SlotOf(uint32_t i) {
    return i % kChains * kChainElems + i / kChains;
  }

  template <class Thread>
  THALWEG_DEVICE static void Run(const Thread& thread, Shared& shared, const Args& args) {
    if (*args.step.skip != 0) return;
    uint32_t tile = 0;
    ForEachPieceOf(args.step.table, thread.Block(), thread.Blocks(), [&](const FlatPiece& piece) {
      const OptimEntry& tensor = args.step.table.entries[piece.tensor];
      const LambPrepared& prepared = args.step.prepared[piece.tensor];
      double chain = 0;
      for (uint64_t first = piece.first; first < piece.last; first += kTile, ++tile) {
        const uint64_t last = first + kTile < piece.last ? first + kTile : piece.last;
        Squared& squared = shared.tiles[tile % 2];
        if (thread.Index() < kWorkers) Work(thread, tensor, prepared, first, last, &squared);
        thread.SyncBlock();
        if (thread.Index() < kWorkers || !prepared.is_trusted) continue;
        if (first % kGranule == 0) chain = 0;
        chain = AddSquares(thread, squared, static_cast<uint32_t>(last - first), chain);
        if (last % kGranule != 0 && last != piece.last) continue;
        const double total = TotalOfChains(thread, chain);
        const uint64_t granule = piece.granule + (first - piece.first) / kGranule;
        if (thread.Lane() == 0) args.param_squares[granule] = total;
        if (thread.Lane() == kChains) args.update_squares[granule] = total;
      }
    });
  }

  template <class Thread>
  THALWEG_DEVICE static void Work(const Thread& thread, const OptimEntry& tensor,
                                  const LambPrepared& prepared, uint64_t first, uint64_t last,
                                  Squared* squared) {
    ForEachPlace<false>(
        thread.Index(), kWorkers, tensor.head, first, last,
        [&]<bool kPacked>(const ElementPlace& place) {
          return LoadTensor<kPacked, 2>(tensor, place);
        },
        [&]<bool kPacked>(const ElementPlace& place, const LoadedTensor<2>& loaded) {
          float params[kQuad];
          float updates[kQuad];
          Moments<kPacked>(tensor, prepared.factors, place, loaded, params, updates);
          if (!prepared.is_trusted) return;
          for (uint32_t e = 0; e < kQuad; ++e) {
            if (e >= place.count) continue;
            const uint32_t slot = SlotOf(static_cast<uint32_t>(place.At(e) - first));
            squared->params[slot] = params[e];
            squared->updates[slot] = updates[e];
          }
        });
  }

  template <bool kPacked>
  THALWEG_DEVICE static void Moments(const OptimEntry& tensor, const LambFactors& factors,
                                     const ElementPlace& place, const LoadedTensor<2>& loaded,
                                     float* params, float* updates) {
    constexpr ElementType kState = ElementType::kFp32;
    float grads[kQuad];
    float moments[2][kQuad];
    for (int k = 0; k < 2; ++k) Widen<kPacked>(loaded.states[k], kState, moments[k]);
    Widen<kPacked>(loaded.param, tensor.param_type, params);
    Widen<kPacked>(loaded.grad, tensor.grad_type, grads);
    for (uint32_t e = 0; e < kQuad; ++e) {
      LambMoments(factors, params[e], grads[e], &moments[0][e], &moments[1][e]);
      updates[e] = LambUpdate(factors, params[e], moments[0][e], moments[1][e]);
    }
    for (int k = 0; k < 2; ++k) Store<kPacked>(moments[k], kState, place, tensor.states[k]);
  }

  // Adds to this lane's sum its part of the first `count` elements of a tile: the lower lanes have
  // the parameters' sums, the upper ones the updates'.
  template <class Thread>
  THALWEG_DEVICE static double AddSquares(const Thread& thread, const Squared& squared,
                                          uint32_t count, double sum) {
    constexpr uint32_t kAtOnce = 16;  // reads in flight
    const uint32_t chain = thread.Lane() % kChains;
    const float* const values =
        (thread.Lane() < kChains ? squared.params : squared.updates) + chain * kChainElems;
    const uint32_t own = (count + kChains - 1 - chain) / kChains;
    for (uint32_t begin = 0; begin < own; begin += kAtOnce) {
      float read[kAtOnce];
      for (uint32_t k = 0; k < kAtOnce; ++k) read[k] = begin + k < own ? values[begin + k] : 0.0f;
      for (uint32_t k = 0; k < kAtOnce; ++k) sum = AddSquare(read[k], sum);
    }
    return sum;
  }
};

// This kernel has a block for each tensor.
struct TrustKernel {
  static constexpr uint32_t kThreads = kParts;
  struct Shared {
    double parts[kParts];
  };
  using Args = TrustWork;

  template <class Thread>
  THALWEG_DEVICE static void Run(const Thread& thread, Shared& shared, const Args& args) {
    LambPrepared& prepared = args.prepared[thread.Block()];
    if (*args.skip != 0 || !prepared.is_trusted) return;
    const FlatEntry& flat = args.table.entries[thread.Block()].flat;
    const uint64_t count = GranulesOf(flat.elems);
    const double params =
        TotalOfGranules(thread, args.param_squares + flat.first_granule, count, shared.parts);
    const double updates =
        TotalOfGranules(thread, args.update_squares + flat.first_granule, count, shared.parts);
    if (thread.Index() == 0) prepared.rate = TrustedRate(prepared.rate, params, updates);
  }
};

struct LambStepKernel {
  static constexpr uint32_t kThreads = 256;
  struct Shared {};
  using Args = StepWork<LambPrepared>;

  template <class Thread>
  THALWEG_DEVICE static void Run(const Thread& thread, Shared&, const Args& args) {
    if (*args.skip != 0) return;
    ForEachPieceOf(args.table, thread.Block(), thread.Blocks(), [&](const FlatPiece& piece) {
      const OptimEntry tensor = args.table.entries[piece.tensor];
      const LambPrepared prepared = args.prepared[piece.tensor];
      ForEachPlace<false>(
          thread.Index(), kThreads, tensor.head, piece.first, piece.last,
          [&]<bool kPacked>(const ElementPlace& place) { return Read<kPacked>(tensor, place); },
          [&]<bool kPacked>(const ElementPlace& place, const Loaded& loaded) {
            Step<kPacked>(tensor, prepared, place, loaded);
          });
    });
  }

  struct Loaded {
    Quad param;
    Quad states[2];
  };

  template <bool kPacked>
  THALWEG_DEVICE static Loaded Read(const OptimEntry& tensor, const ElementPlace& place) {
    return {Load<kPacked>(tensor.param, tensor.param_type, place),
            {Load<kPacked>(tensor.states[0], ElementType::kFp32, place),
             Load<kPacked>(tensor.states[1], ElementType::kFp32, place)}};
  }

  template <bool kPacked>
  THALWEG_DEVICE static void Step(const OptimEntry& tensor, const LambPrepared& prepared,
                                  const ElementPlace& place, const Loaded& loaded) {
    float params[kQuad];
    float moments[2][kQuad];
    for (int k = 0; k < 2; ++k) {
      Widen<kPacked>(loaded.states[k], ElementType::kFp32, moments[k]);
    }
    Widen<kPacked>(loaded.param, tensor.param_type, params);
    for (uint32_t e = 0; e < kQuad; ++e) {
      const float update = LambUpdate(prepared.factors, params[e], moments[0][e], moments[1][e]);
      params[e] = LambStep(prepared.rate, params[e], update);
    }
    StoreParams<kPacked>(tensor, params, place);
  }
};

}  // namespace

LaunchError LaunchLambMoments(CudaStream stream, const LambMomentsWork& work) {
  return LaunchResident<LambMomentsKernel>(stream, work.step.table.granules, work);
}

LaunchError LaunchTrust(CudaStream stream, const TrustWork& work) {
  return Launch<TrustKernel>(stream, work.table.count, work);
}

LaunchError LaunchLambStep(CudaStream stream, const StepWork<LambPrepared>& work) {
  return LaunchResident<LambStepKernel>(stream, work.table.granules, work);
}

}  // namespace thalweg
