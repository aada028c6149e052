#include "kernels/cast/cast_launch.h"
#include "kernels/cast/element.h"
#include "kernels/launch/launch.h"
#include "kernels/launch/pack.h"
#include "kernels/launch/walk.h"

namespace thalweg {
namespace {

// Reads are of 16 bytes or more, or of 8 where types widen; writes are of 16 bytes, and those of a
// warp are adjacent: two halves of a sector that are written apart cost the memory twice. Or
// accesses are of one element.
template <class From, class To, int kPackElems>
struct CastKernel {
  static constexpr uint32_t kThreads = 256;
  struct Shared {};
  struct Args {
    const void* in;
    void* out;
    Walk walk;
  };

  template <class Thread>
  THALWEG_DEVICE static void Run(const Thread& thread, Shared&, const Args& args) {
    WalkBlock<kThreads, kPackElems>(thread, args.walk,
                                    [&]<int kPacks, int kElems>(uint64_t first, uint64_t stride) {
                                      Pack<From, kElems> in[kPacks];
                                      for (int p = 0; p < kPacks; ++p) {
                                        in[p] = LoadPack<From, kElems>(args.in, first + p * stride);
                                      }
                                      for (int p = 0; p < kPacks; ++p) {
                                        Pack<To, kElems> out;
                                        for (int e = 0; e < kElems; ++e) {
                                          out.bits[e] = To::Narrow(From::Widen(in[p].bits[e]));
                                        }
                                        StorePack<To, kElems>(out, args.out, first + p * stride);
                                      }
                                    });
  }
};

// Finds a walk in which packs begin at multiples of 16 bytes in both; returns false if there is
// none.
template <class From, class To>
bool WalkBothInPacks(const void* in, void* out, uint64_t elems, uint32_t pack_elems, Walk* walk) {
  constexpr size_t kFromBytes = sizeof(typename From::Bits);
  constexpr size_t kToBytes = sizeof(typename To::Bits);
  if constexpr (kFromBytes < kToBytes) {
    const void* const wide = out;
    return WalkInPacks(in, kFromBytes, &wide, 1, kToBytes, elems, pack_elems, walk);
  } else {
    return WalkInPacks(out, kToBytes, &in, 1, kFromBytes, elems, pack_elems, walk);
  }
}

}  // namespace

template <class From, class To>
LaunchError LaunchCast(CudaStream stream, const void* in, void* out, uint64_t elems) {
  constexpr int kPackElems = 16 / sizeof(typename To::Bits);
  Walk walk;
  if (WalkBothInPacks<From, To>(in, out, elems, kPackElems, &walk)) {
    using Kernel = CastKernel<From, To, kPackElems>;
    return Launch<Kernel>(stream, BlocksOfWalk<Kernel::kThreads, kPackElems>(walk),
                          {in, out, walk});
  }
  using Kernel = CastKernel<From, To, 1>;
  walk = WalkElements(elems);
  return Launch<Kernel>(stream, BlocksOfWalk<Kernel::kThreads, 1>(walk), {in, out, walk});
}

LaunchError LaunchCopy(CudaStream stream, const void* in, void* out, uint64_t bytes) {
  return CopyOnDevice(stream, in, out, bytes);
}

template LaunchError LaunchCast<Fp32, Fp16>(CudaStream, const void*, void*, uint64_t);
template LaunchError LaunchCast<Fp32, BFloat16>(CudaStream, const void*, void*, uint64_t);
template LaunchError LaunchCast<Fp16, Fp32>(CudaStream, const void*, void*, uint64_t);
template LaunchError LaunchCast<BFloat16, Fp32>(CudaStream, const void*, void*, uint64_t);

}  // namespace thalweg
