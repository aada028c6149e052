#include "kernels/codec/block_kernel.h"
#include "kernels/codec/block_launch.h"
#include "kernels/codec/onebit/onebit_scalar.h"
#include "kernels/codec/onebit/rotation.h"
#include "kernels/launch/combine.h"

namespace thalweg {
namespace {

// A warp takes a block of 1024 elements in 32 rows; lane l has element l of each row. Thus the
// signs of a row are a word of the payload, the strides of the Hadamard transform lie between rows
// or between lanes, and partial sum j takes in turn the elements of lanes j and j + 16 of each row.
constexpr uint32_t kRows = kOneBitBlockElems / 32;
constexpr uint64_t kBlockBytes = sizeof(float) + kOneBitBlockElems / 8;
static_assert(kOneBitPartials == 16);

// Bit l of a row's word says whether the rotation flips the sign of its element l.
struct Flips {
  uint32_t rows[kRows];
};

THALWEG_DEVICE inline float Flip(float x, uint32_t row_flips, uint32_t lane) {
  return BitCast<float>(BitCast<uint32_t>(x) ^ (((row_flips >> lane) & 1u) << 31));
}

template <class Thread>
THALWEG_DEVICE inline void Hadamard(const Thread& thread, float (&x)[kRows]) {
  for (uint32_t stride = kRows / 2; stride > 0; stride /= 2) {
    for (uint32_t row = 0; row < kRows; ++row) {
      if ((row & stride) != 0) continue;
      const float difference = x[row] - x[row + stride];
      x[row] += x[row + stride];
      x[row + stride] = difference;
    }
  }
  for (uint32_t stride = 16; stride > 0; stride /= 2) {
    const bool second = (thread.Lane() & stride) != 0;
    for (uint32_t row = 0; row < kRows; ++row) {
      const float other = thread.ShuffleXor(x[row], stride);
      x[row] = second ? other - x[row] : x[row] + other;
    }
  }
}

// Returns the sum of Add(magnitude, partial sum) over a block, in the order of the format.
template <class Thread, class Add>
THALWEG_DEVICE inline float SumOfMagnitudes(const Thread& thread, const float (&x)[kRows],
                                            const Add& add) {
  float partial = 0;  // number Lane() in the lower half of the warp
  for (uint32_t row = 0; row < kRows; ++row) {
    const float magnitude = BitCast<float>(BitCast<uint32_t>(x[row]) & Fp32::kMagnitude);
    const float upper = thread.ShuffleDown(magnitude, 16);
    partial = add(magnitude, partial);
    partial = add(upper, partial);
  }
  for (uint32_t half = kOneBitPartials / 2; half > 0; half /= 2) {
    partial += thread.ShuffleDown(partial, half);
  }
  return thread.Shuffle(partial, 0);
}

// Returns, for row number Lane(), the bits that say which elements are negative.
template <class Thread>
THALWEG_DEVICE inline uint32_t SignsOf(const Thread& thread, const float (&x)[kRows]) {
  uint32_t signs = 0;
  for (uint32_t row = 0; row < kRows; ++row) {
    const uint32_t word = thread.Ballot(x[row] < 0);
    if (row == thread.Lane()) signs = word;
  }
  return signs;
}

// Changes ±1, one for each element, to what they decode to.
template <class Thread>
THALWEG_DEVICE inline void RotateBack(const Thread& thread, const Flips& flips, float scale,
                                      float (&x)[kRows]) {
  Hadamard(thread, x);
  for (uint32_t row = 0; row < kRows; ++row) {
    x[row] = Flip(x[row], flips.rows[row], thread.Lane()) * scale;
  }
}

template <bool kFeedback>
struct EncodeOneBitKernel {
  static constexpr uint32_t kThreads = kBlockKernelThreads;
  static constexpr uint32_t kAtOnce = 8;
  static_assert(kRows % kAtOnce == 0);
  struct Shared {};
  struct Args {
    BlockEncoding work;
    Flips flips;
    bool words;  // the payload lies at a multiple of 4
  };

  template <class Thread>
  THALWEG_DEVICE static void Run(const Thread& thread, Shared&, const Args& args) {
    const BlockPlace place = PlaceOf<kOneBitBlockElems, kBlockBytes>(thread, args.work.elems);
    if (place.elems == 0) return;
    float x[kRows];
    if (place.elems == kOneBitBlockElems) {
      for (uint32_t row = 0; row < kRows; row += kAtOnce) {
        LoadRows(args.work, place.first + row * 32 + thread.Lane(), &x[row]);
      }
    } else {
      for (uint32_t row = 0; row < kRows; ++row) {
        const uint32_t i = row * 32 + thread.Lane();
        x[row] = i < place.elems ? LoadX(args.work, place.first + i) : 0;  // adds nothing to a sum
      }
    }
    uint32_t nonfinite = 0;
    for (const float each : x) nonfinite += IsFinite<Fp32>(BitCast<uint32_t>(each)) ? 0 : 1;
    float scale = Fp32::Widen(Fp32::kNan);
    uint32_t signs = 0;
    if (thread.Ballot(nonfinite > 0) == 0) {
      if (place.elems == kOneBitBlockElems) {
        EncodeWhole(thread, args, place, x, &scale, &signs);
      } else {
        EncodeShort(thread, args, place, x, &scale, &signs);
      }
    }
    std::byte* const out = args.work.out + place.offset;
    if (thread.Lane() == 0) StoreWord(BitCast<uint32_t>(scale), out, args.words);
    StoreBlockWord(signs, out + sizeof(float), 4 * thread.Lane(), (place.elems + 7) / 8,
                   args.words);
    AddInWarp(thread, nonfinite, args.work.nonfinite);
  }

  THALWEG_DEVICE static float LoadX(const BlockEncoding& work, uint64_t i) {
    return kFeedback ? work.values[i] + work.residual[i] : work.values[i];
  }

  // Loads x of kAtOnce rows, of which `first` is this lane's first element; all reads are in flight
  // together.
  THALWEG_DEVICE static void LoadRows(const BlockEncoding& work, uint64_t first, float* x) {
    float left[kAtOnce] = {};
    for (uint32_t k = 0; kFeedback && k < kAtOnce; ++k) left[k] = work.residual[first + k * 32];
    for (uint32_t k = 0; k < kAtOnce; ++k) x[k] = work.values[first + k * 32];
    for (uint32_t k = 0; kFeedback && k < kAtOnce; ++k) x[k] += left[k];
  }

  // Reading x again, from a cache, costs less than keeping it beside the rotated block, which would
  // take 32 more registers.
  template <class Thread>
  THALWEG_DEVICE static void EncodeWhole(const Thread& thread, const Args& args,
                                         const BlockPlace& place, float (&x)[kRows], float* scale,
                                         uint32_t* signs) {
    for (uint32_t row = 0; row < kRows; ++row) {
      x[row] = Flip(x[row], args.flips.rows[row], thread.Lane()) * kRotationShrink;
    }
    Hadamard(thread, x);
    *scale = WholeOneBitScale(SumOfMagnitudes(
        thread, x, [](float magnitude, float partial) { return partial + magnitude; }));
    *signs = SignsOf(thread, x);
    if constexpr (kFeedback) {
      for (float& z : x) z = z < 0 ? -1.0f : 1.0f;
      RotateBack(thread, args.flips, *scale, x);
      for (uint32_t row = 0; row < kRows; row += kAtOnce) {
        StoreResiduals(args.work, place.first + row * 32 + thread.Lane(), &x[row]);
      }
    }
  }

  // Stores the residuals of kAtOnce rows, of which `first` is this lane's first element. All are
  // read before any is stored: a store may change what a later read gets, so the reads would wait
  // for each other.
  THALWEG_DEVICE static void StoreResiduals(const BlockEncoding& work, uint64_t first,
                                            const float* decoded) {
    float again[kAtOnce];
    LoadRows(work, first, again);
    for (uint32_t k = 0; k < kAtOnce; ++k) {
      work.residual[first + k * 32] = WholeOneBitResidual(again[k], decoded[k]);
    }
  }

  template <class Thread>
  THALWEG_DEVICE static void EncodeShort(const Thread& thread, const Args& args,
                                         const BlockPlace& place, const float (&x)[kRows],
                                         float* scale, uint32_t* signs) {
    const float sum = SumOfMagnitudes(thread, x, [](float magnitude, float partial) {
      return AddToOneBitPartial(magnitude, partial);
    });
    *scale = ShortOneBitScale(sum, place.elems);
    *signs = SignsOf(thread, x);
    for (uint32_t row = 0; kFeedback && row < kRows; ++row) {
      const uint32_t i = row * 32 + thread.Lane();
      if (i < place.elems)
        args.work.residual[place.first + i] = ShortOneBitResidual(x[row], *scale);
    }
  }
};

struct DecodeOneBitKernel {
  static constexpr uint32_t kThreads = kBlockKernelThreads;
  struct Shared {};
  struct Args {
    BlockDecoding work;
    Flips flips;
    bool words;
  };

  template <class Thread>
  THALWEG_DEVICE static void Run(const Thread& thread, Shared&, const Args& args) {
    const BlockPlace place = PlaceOf<kOneBitBlockElems, kBlockBytes>(thread, args.work.elems);
    if (place.elems == 0) return;
    const std::byte* const in = args.work.in + place.offset;
    const uint32_t scale = LoadWord(in, args.words);
    const uint32_t signs =
        LoadBlockWord(in + sizeof(float), 4 * thread.Lane(), (place.elems + 7) / 8, args.words);
    const bool whole = place.elems == kOneBitBlockElems;
    float x[kRows];
    for (uint32_t row = 0; row < kRows; ++row) {
      const uint32_t sign = (thread.Shuffle(signs, row) >> thread.Lane()) & 1u;
      x[row] = DecodeShortOneBit(sign, whole ? BitCast<uint32_t>(1.0f) : scale);
    }
    if (whole) RotateBack(thread, args.flips, BitCast<float>(scale), x);
    for (uint32_t row = 0; row < kRows; ++row) {
      const uint32_t i = row * 32 + thread.Lane();
      if (i >= place.elems) continue;
      args.work.out[place.first + i] = IsFinite<Fp32>(scale) ? x[row] : Fp32::Widen(Fp32::kNan);
    }
  }
};

Flips RowsOfFlips() {
  Flips flips = {};
  for (uint32_t i = 0; i < kOneBitBlockElems; ++i) {
    flips.rows[i / 32] |= kRotationFlips[i] >> 31 << (i % 32);
  }
  return flips;
}

LaunchError Encode(CudaStream stream, const BlockEncoding& work) {
  const bool words = IsAligned(work.out, 4);
  const uint64_t blocks = BlocksOfBlockKernel<kOneBitBlockElems>(work.elems);
  if (work.residual == nullptr) {
    return Launch<EncodeOneBitKernel<false>>(stream, blocks, {work, RowsOfFlips(), words});
  }
  return Launch<EncodeOneBitKernel<true>>(stream, blocks, {work, RowsOfFlips(), words});
}

LaunchError Decode(CudaStream stream, const BlockDecoding& work) {
  return Launch<DecodeOneBitKernel>(stream, BlocksOfBlockKernel<kOneBitBlockElems>(work.elems),
                                    {work, RowsOfFlips(), IsAligned(work.in, 4)});
}

}  // namespace

BlockLaunches OneBitLaunches() { return {&Encode, &Decode}; }

}  // namespace thalweg
