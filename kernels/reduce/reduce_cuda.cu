#include "kernels/cast/element.h"
#include "kernels/launch/combine.h"
#include "kernels/launch/launch.h"
#include "kernels/launch/pack.h"
#include "kernels/launch/walk.h"
#include "kernels/reduce/divide.h"
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

  using Accumulator = typename In::Accumulator;

  template <int kPacks, int kElems>
  struct Packs {
    Pack<In, kElems> at[kPacks];
  };

  template <int kPacks, int kElems>
  THALWEG_DEVICE static Packs<kPacks, kElems> Load(const void* input, uint64_t first,
                                                   uint64_t stride) {
    Packs<kPacks, kElems> packs;
    for (int p = 0; p < kPacks; ++p) {
      packs.at[p] = LoadPack<In, kElems>(input, first + p * stride);
    }
    return packs;
  }

  // All packs advance together, and those of the next input are read before this one's are added,
  // so that many reads are in flight at the same time.
  template <int kPacks, int kElems>
  THALWEG_DEVICE static uint32_t Fold(const FoldWork& work, uint64_t first, uint64_t stride) {
    Accumulator sums[kPacks][kElems];
    for (auto& pack : sums) {
      for (Accumulator& sum : pack) sum = static_cast<Accumulator>(-0.0);  // keeps a -0
    }
    auto in = Load<kPacks, kElems>(work.inputs[0], first, stride);
    for (uint32_t k = 0; k < work.count; ++k) {
      const auto now = in;
      if (k + 1 < work.count) in = Load<kPacks, kElems>(work.inputs[k + 1], first, stride);
      for (int p = 0; p < kPacks; ++p) {
        for (int e = 0; e < kElems; ++e) {
          sums[p][e] = FoldNext<In>(work.weights[k], now.at[p].bits[e], sums[p][e]);
        }
      }
    }
    uint32_t nonfinite = 0;
    for (int p = 0; p < kPacks; ++p) {
      Pack<Out, kElems> out;
      Divide(work.divisor, sums[p]);
      for (int e = 0; e < kElems; ++e) {
        out.bits[e] = FoldLast<Out>(sums[p][e]);
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
