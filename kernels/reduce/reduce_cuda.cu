#include "kernels/cast/element.h"
#include "kernels/launch/combine.h"
#include "kernels/launch/launch.h"
#include "kernels/launch/pack.h"
#include "kernels/launch/walk.h"
#include "kernels/reduce/fold_scalar.h"
#include "kernels/reduce/reduce_launch.h"

namespace thalweg {
namespace {

// Accesses are of 16 bytes in Out and of 16 or 32 in In, or of one element.
template <class In, class Out, int kPackElems>
struct FoldKernel {
  static constexpr uint32_t kThreads = 256;
  struct Shared {};
  struct Args {
    FoldWork work;
    Walk walk;
  };

  template <class Thread>
  THALWEG_DEVICE static void Run(const Thread& thread, Shared&, const Args& args) {
    uint32_t nonfinite = 0;
    WalkBlock<kThreads, kPackElems>(thread, args.walk,
                                    [&]<int kPacks, int kElems>(uint64_t first, uint64_t stride) {
                                      nonfinite += Fold<kPacks, kElems>(args.work, first, stride);
                                    });
    AddInWarp(thread, nonfinite, args.work.nonfinite);
  }

  // All packs advance together, so that their reads are in flight at the same time.
  template <int kPacks, int kElems>
  THALWEG_DEVICE static uint32_t Fold(const FoldWork& work, uint64_t first, uint64_t stride) {
    Pack<In, kElems> in[kPacks];
    typename In::Accumulator sums[kPacks][kElems];
    for (int p = 0; p < kPacks; ++p) {
      in[p] = LoadPack<In, kElems>(work.inputs[0], first + p * stride);
    }
    for (int p = 0; p < kPacks; ++p) {
      for (int e = 0; e < kElems; ++e) {
        sums[p][e] = FoldFirst<In>(work.weights[0], in[p].bits[e]);
      }
    }
    for (uint32_t k = 1; k < work.count; ++k) {
      for (int p = 0; p < kPacks; ++p) {
        in[p] = LoadPack<In, kElems>(work.inputs[k], first + p * stride);
      }
      for (int p = 0; p < kPacks; ++p) {
        for (int e = 0; e < kElems; ++e) {
          sums[p][e] = FoldNext<In>(work.weights[k], in[p].bits[e], sums[p][e]);
        }
      }
    }
    uint32_t nonfinite = 0;
    for (int p = 0; p < kPacks; ++p) {
      Pack<Out, kElems> out;
      for (int e = 0; e < kElems; ++e) {
        out.bits[e] = FoldLast<Out>(sums[p][e], work.divisor);
        nonfinite += IsFinite<Out>(out.bits[e]) ? 0 : 1;
      }
      StorePack<Out, kElems>(out, work.out, first + p * stride);
    }
    return nonfinite;
  }
};

}  // namespace

template <class In, class Out>
LaunchError LaunchFold(CudaStream stream, const FoldWork& work) {
  constexpr int kPackElems = 16 / sizeof(typename Out::Bits);
  Walk walk;
  if (WalkInPacks(work.out, sizeof(typename Out::Bits), work.inputs, work.count,
                  sizeof(typename In::Bits), work.elems, kPackElems, &walk)) {
    using Kernel = FoldKernel<In, Out, kPackElems>;
    return Launch<Kernel>(stream, BlocksOfWalk<Kernel::kThreads, kPackElems>(walk), {work, walk});
  }
  using Kernel = FoldKernel<In, Out, 1>;
  walk = WalkElements(work.elems);
  return Launch<Kernel>(stream, BlocksOfWalk<Kernel::kThreads, 1>(walk), {work, walk});
}

template LaunchError LaunchFold<Fp32, Fp32>(CudaStream, const FoldWork&);
template LaunchError LaunchFold<Fp32, Fp16>(CudaStream, const FoldWork&);
template LaunchError LaunchFold<Fp32, BFloat16>(CudaStream, const FoldWork&);
template LaunchError LaunchFold<Fp16, Fp16>(CudaStream, const FoldWork&);
template LaunchError LaunchFold<BFloat16, BFloat16>(CudaStream, const FoldWork&);
template LaunchError LaunchFold<Fp64, Fp64>(CudaStream, const FoldWork&);

}  // namespace thalweg
