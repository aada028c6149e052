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
#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "kernels/codec/feedback.h"

HWY_BEFORE_NAMESPACE();
namespace thalweg {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// How residuals are stored: not at all, or past the caches if they lie apart from the last ones,
// so that their lines are not read first. A whole block's lie on a boundary of kStreamBytes then.
enum class Residuals { kNone, kCached, kStreamed };
constexpr size_t kStreamBytes = 64;

// Returns an element of x.
template <Residuals kResiduals>
HWY_INLINE float Sum(const float* values, Feedback feedback, size_t i) {
  return kResiduals == Residuals::kNone ? values[i] : values[i] + feedback.last[i];
}

template <Residuals kResiduals, class D, class V>
HWY_INLINE void StoreResidual(V residual, D d, float* to) {
  if constexpr (kResiduals == Residuals::kStreamed) {
    hn::Stream(residual, d, to);
  } else {
    hn::StoreU(residual, d, to);
  }
}

// `Block` is a format: it has
//   static constexpr WireFormat kFormat;
//   template <Residuals kResiduals> static uint64_t Encode(const float* values, Feedback feedback,
//                                                          size_t elems, std::byte* out);
//   static void Decode(const std::byte* in, size_t elems, float* out);
// which take one block of `elems` elements; only the last block of a chunk is not whole. Encode
// returns how many elements are not finite.

template <class Block, Residuals kResiduals>
HWY_INLINE uint64_t EncodeEveryBlock(const float* values, Feedback feedback, size_t elems,
                                     std::byte* out) {
  constexpr size_t kElems = FindLossy(Block::kFormat)->block_elems;
  constexpr size_t kBytes = MaxEncodedBytes(Block::kFormat, kElems);
  uint64_t nonfinite = 0;
  for (size_t done = 0; done < elems; done += kElems, out += kBytes) {
    nonfinite += Block::template Encode<kResiduals>(
        values + done, kResiduals == Residuals::kNone ? feedback : feedback.From(done),
        std::min(elems - done, kElems), out);
  }
  if (kResiduals == Residuals::kStreamed) hwy::FlushStream();
  return nonfinite;
}

// Encodes a chunk.
template <class Block>
HWY_INLINE uint64_t EncodeEveryBlock(const float* values, Feedback feedback, size_t elems,
                                     std::byte* out) {
  if (!feedback) return EncodeEveryBlock<Block, Residuals::kNone>(values, feedback, elems, out);
  const bool streams = feedback.last != feedback.next &&
                       reinterpret_cast<uintptr_t>(feedback.next) % kStreamBytes == 0;
  return streams ? EncodeEveryBlock<Block, Residuals::kStreamed>(values, feedback, elems, out)
                 : EncodeEveryBlock<Block, Residuals::kCached>(values, feedback, elems, out);
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
