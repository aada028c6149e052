// This header walks over the blocks of a chunk, for formats whose payloads are blocks. Sources that
// compile themselves once per Highway target include it, hence the guard that toggles.
#if defined(THALWEG_KERNELS_CODEC_BLOCKS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef THALWEG_KERNELS_CODEC_BLOCKS_INL_H_
#undef THALWEG_KERNELS_CODEC_BLOCKS_INL_H_
#else
#define THALWEG_KERNELS_CODEC_BLOCKS_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/base/wire_format.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace thalweg {
namespace HWY_NAMESPACE {

// `Block` is a format: it has
//   static constexpr WireFormat kFormat;
//   template <bool kFeedback> static uint64_t Encode(const float* values, float* residual,
//                                                    size_t elems, std::byte* out);
//   static void Decode(const std::byte* in, size_t elems, float* out);
// which take one block of `elems` elements; only the last block of a chunk is not whole. Encode
// returns how many elements are not finite.

template <class Block, bool kFeedback>
HWY_INLINE uint64_t EncodeEveryBlock(const float* values, float* residual, size_t elems,
                                     std::byte* out) {
  constexpr size_t kElems = FindLossy(Block::kFormat)->block_elems;
  constexpr size_t kBytes = MaxEncodedBytes(Block::kFormat, kElems);
  uint64_t nonfinite = 0;
  for (size_t done = 0; done < elems; done += kElems, out += kBytes) {
    nonfinite += Block::template Encode<kFeedback>(
        values + done, kFeedback ? residual + done : nullptr, std::min(elems - done, kElems), out);
  }
  return nonfinite;
}

// Encodes a chunk, with feedback unless `residual` is null.
template <class Block>
HWY_INLINE uint64_t EncodeEveryBlock(const float* values, float* residual, size_t elems,
                                     std::byte* out) {
  return residual == nullptr ? EncodeEveryBlock<Block, false>(values, nullptr, elems, out)
                             : EncodeEveryBlock<Block, true>(values, residual, elems, out);
}

template <class Block>
HWY_INLINE void DecodeEveryBlock(const std::byte* in, size_t elems, float* out) {
  constexpr size_t kElems = FindLossy(Block::kFormat)->block_elems;
  constexpr size_t kBytes = MaxEncodedBytes(Block::kFormat, kElems);
  for (size_t done = 0; done < elems; done += kElems, in += kBytes) {
    Block::Decode(in, std::min(elems - done, kElems), out + done);
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace thalweg
HWY_AFTER_NAMESPACE();

#endif  // THALWEG_KERNELS_CODEC_BLOCKS_INL_H_
