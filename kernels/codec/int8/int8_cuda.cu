#include "kernels/codec/block_kernel.h"
#include "kernels/codec/block_launch.h"
#include "kernels/codec/int8/int8_scalar.h"
#include "kernels/launch/combine.h"

namespace thalweg {
namespace {

// A warp takes a block of 256 elements. Each lane has eight: four, and the four that lie 128 later.
// Thus a lane's codes are two words, and a warp's accesses are adjacent.
constexpr uint32_t kQuads = 2;
constexpr uint32_t kQuadStride = 128;
constexpr uint64_t kBlockBytes = sizeof(float) + kInt8BlockElems;

using Quad = Pack<Fp32, 4>;

// Loads a quad, with zeros from number `elems` on. `wide` when the quad is complete and lies at a
// multiple of 16 bytes.
THALWEG_DEVICE inline Quad LoadQuad(const float* array, uint32_t at, uint32_t elems, bool wide) {
  if (wide) return LoadPack<Fp32, 4>(array, at);
  Quad quad;
  for (uint32_t e = 0; e < 4; ++e) {
    quad.bits[e] = at + e < elems ? BitCast<uint32_t>(array[at + e]) : 0;
  }
  return quad;
}

THALWEG_DEVICE inline void StoreQuad(const Quad& quad, float* array, uint32_t at, uint32_t elems,
                                     bool wide) {
  if (wide) return StorePack<Fp32, 4>(quad, array, at);
  for (uint32_t e = 0; e < 4; ++e) {
    if (at + e < elems) array[at + e] = Fp32::Widen(quad.bits[e]);
  }
}

template <class Thread>
THALWEG_DEVICE inline uint32_t QuadAt(const Thread& thread, uint32_t quad) {
  return quad * kQuadStride + 4 * thread.Lane();
}

template <bool kFeedback>
struct EncodeInt8Kernel {
  static constexpr uint32_t kThreads = kBlockKernelThreads;
  struct Shared {};
  struct Args {
    BlockEncoding work;
    bool wide;   // floats lie at multiples of 16 bytes
    bool words;  // the payload lies at a multiple of 4
  };

  template <class Thread>
  THALWEG_DEVICE static void Run(const Thread& thread, Shared&, const Args& args) {
    const BlockPlace place = PlaceOf<kInt8BlockElems, kBlockBytes>(thread, args.work.elems);
    if (place.elems == 0) return;
    const bool wide = args.wide && place.elems == kInt8BlockElems;
    const float* const values = args.work.values + place.first;
    float* const residual = kFeedback ? args.work.residual + place.first : nullptr;
    Quad x[kQuads];
    Quad left[kQuads];
    for (uint32_t q = 0; q < kQuads; ++q) {
      const uint32_t at = QuadAt(thread, q);
      x[q] = LoadQuad(values, at, place.elems, wide);
      if constexpr (kFeedback) left[q] = LoadQuad(residual, at, place.elems, wide);
    }
    uint32_t nonfinite = 0;
    uint32_t largest = 0;
    for (uint32_t q = 0; q < kQuads; ++q) nonfinite += AddQuad(left[q], &x[q], &largest);
    for (uint32_t mask = 16; mask > 0; mask /= 2) {
      const uint32_t other = thread.ShuffleXor(largest, mask);
      largest = other > largest ? other : largest;
    }
    const Int8Scale scale = Int8ScaleOf(largest);
    std::byte* const out = args.work.out + place.offset;
    if (thread.Lane() == 0) StoreWord(BitCast<uint32_t>(scale.value), out, args.words);
    for (uint32_t q = 0; q < kQuads; ++q) {
      const uint32_t at = QuadAt(thread, q);
      const uint32_t codes = EncodeQuad(x[q], scale, &left[q]);
      StoreBlockWord(codes, out + sizeof(float), at, place.elems, args.words);
      if constexpr (kFeedback) StoreQuad(left[q], residual, at, place.elems, wide);
    }
    AddInWarp(thread, nonfinite, args.work.nonfinite);
  }

  // Adds the residual to x, raises `*largest` to the magnitudes that are finite, and returns how
  // many are not.
  THALWEG_DEVICE static uint32_t AddQuad(const Quad& left, Quad* x, uint32_t* largest) {
    uint32_t nonfinite = 0;
    for (int e = 0; e < 4; ++e) {
      if constexpr (kFeedback) {
        x->bits[e] = Fp32::Narrow(Fp32::Widen(x->bits[e]) + Fp32::Widen(left.bits[e]));
      }
      const uint32_t magnitude = x->bits[e] & Fp32::kMagnitude;
      if (magnitude >= Fp32::kInfinity) {
        ++nonfinite;
      } else if (magnitude > *largest) {
        *largest = magnitude;
      }
    }
    return nonfinite;
  }

  // Returns the codes of four elements, the first in the lowest byte; sets their residuals.
  THALWEG_DEVICE static uint32_t EncodeQuad(const Quad& x, const Int8Scale& scale, Quad* left) {
    uint32_t codes = 0;
    for (int e = 0; e < 4; ++e) {
      float residual = kFeedback ? Fp32::Widen(left->bits[e]) : 0;
      const int8_t code = EncodeInt8Element(Fp32::Widen(x.bits[e]), scale, &residual);
      if constexpr (kFeedback) left->bits[e] = Fp32::Narrow(residual);
      codes |= uint32_t{static_cast<uint8_t>(code)} << (8 * e);
    }
    return codes;
  }
};

// A block's codes are few bytes, so a warp reads those of several blocks before it writes.
struct DecodeInt8Kernel {
  static constexpr uint32_t kThreads = kBlockKernelThreads;
  static constexpr uint32_t kBlocksAtOnce = 8;
  static constexpr uint32_t kPerWarp = 2;
  struct Shared {};
  struct Args {
    BlockDecoding work;
    bool wide;
    bool words;
  };

  template <class Thread>
  THALWEG_DEVICE static void Run(const Thread& thread, Shared&, const Args& args) {
    const BlockPlace first = PlaceAt(thread, args, 0);
    const BlockPlace last = PlaceAt(thread, args, kPerWarp - 1);
    if (last.elems == kInt8BlockElems && args.words) {
      const std::byte* const in = args.work.in + first.offset;
      Codes codes[kPerWarp];
      for (uint32_t b = 0; b < kPerWarp; ++b) codes[b] = LoadWhole(thread, in + b * kBlockBytes);
      for (uint32_t b = 0; b < kPerWarp; ++b) {
        Decode(thread, args, PlaceAt(thread, args, b), codes[b]);
      }
    } else {
      for (uint32_t b = 0; b < kPerWarp; ++b) {
        const BlockPlace place = PlaceAt(thread, args, b);
        if (place.elems > 0) Decode(thread, args, place, Load(thread, args, place));
      }
    }
  }

 private:
  struct Codes {
    uint32_t words[kQuads];
    float scale;
  };

  template <class Thread>
  THALWEG_DEVICE static BlockPlace PlaceAt(const Thread& thread, const Args& args, uint32_t which) {
    return PlaceOf<kInt8BlockElems, kBlockBytes, kPerWarp>(thread, args.work.elems, which);
  }

  // Nothing is asked between the reads, so that those of all blocks are in flight together.
  template <class Thread>
  THALWEG_DEVICE static Codes LoadWhole(const Thread& thread, const std::byte* in) {
    Codes codes;
    codes.scale = BitCast<float>(LoadWord(in, true));
    for (uint32_t q = 0; q < kQuads; ++q) {
      codes.words[q] = LoadWord(in + sizeof(float) + QuadAt(thread, q), true);
    }
    return codes;
  }

  template <class Thread>
  THALWEG_DEVICE static Codes Load(const Thread& thread, const Args& args,
                                   const BlockPlace& place) {
    Codes codes;
    const std::byte* const in = args.work.in + place.offset;
    codes.scale = BitCast<float>(LoadWord(in, args.words));
    for (uint32_t q = 0; q < kQuads; ++q) {
      codes.words[q] =
          LoadBlockWord(in + sizeof(float), QuadAt(thread, q), place.elems, args.words);
    }
    return codes;
  }

  template <class Thread>
  THALWEG_DEVICE static void Decode(const Thread& thread, const Args& args, const BlockPlace& place,
                                    const Codes& codes) {
    const bool wide = args.wide && place.elems == kInt8BlockElems;
    for (uint32_t q = 0; q < kQuads; ++q) {
      Quad decoded;
      for (int e = 0; e < 4; ++e) {
        const auto code = static_cast<int8_t>(static_cast<uint8_t>(codes.words[q] >> (8 * e)));
        decoded.bits[e] = Fp32::Narrow(DecodeInt8Element(code, codes.scale));
      }
      StoreQuad(decoded, args.work.out + place.first, QuadAt(thread, q), place.elems, wide);
    }
  }
};

LaunchError Encode(CudaStream stream, const BlockEncoding& work) {
  const bool wide = IsAligned(work.values, 16) && IsAligned(work.residual, 16);
  const bool words = IsAligned(work.out, 4);
  const uint64_t blocks = BlocksOfBlockKernel<kInt8BlockElems>(work.elems);
  if (work.residual == nullptr) {
    return Launch<EncodeInt8Kernel<false>>(stream, blocks, {work, wide, words});
  }
  return Launch<EncodeInt8Kernel<true>>(stream, blocks, {work, wide, words});
}

LaunchError Decode(CudaStream stream, const BlockDecoding& work) {
  using Kernel = DecodeInt8Kernel;
  const uint64_t blocks = BlocksOfBlockKernel<kInt8BlockElems, Kernel::kPerWarp>(work.elems);
  return Launch<Kernel>(stream, blocks, {work, IsAligned(work.out, 16), IsAligned(work.in, 4)});
}

}  // namespace

BlockLaunches Int8Launches() { return {&Encode, &Decode}; }

}  // namespace thalweg
