// This header walks arrays in packs: it says which elements each thread of a kernel takes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/launch/host_device.h"

namespace thalweg {

// A Walk takes elements [0, head) one by one, then `packs` packs, then the rest of `elems` one by
// one.
struct Walk {
  uint64_t head = 0;
  uint64_t packs = 0;
  uint64_t elems = 0;
};

// Sets `walk` such that packs of `pack_elems` elements begin at multiples of 16 bytes in all of
// `others`, and of 16 bytes or of a pack in the array `narrow`, and returns true; returns false
// when no such walk exists for their addresses. Requires that packs are a multiple of 16 bytes in
// `others` and of 8 in `narrow`, arrays are aligned to their elements, and elements of `others` are
// not smaller than those of `narrow`.
inline bool WalkInPacks(const void* narrow, size_t narrow_bytes, const void* const* others,
                        size_t others_count, size_t others_bytes, uint64_t elems,
                        uint32_t pack_elems, Walk* walk) {
  const uint64_t past = reinterpret_cast<uintptr_t>(narrow) % 16;
  const uint64_t head = (16 - past) % 16 / narrow_bytes;
  for (size_t k = 0; k < others_count; ++k) {
    if ((reinterpret_cast<uintptr_t>(others[k]) + head * others_bytes) % 16 != 0) return false;
  }
  if (elems < head + pack_elems) return false;
  *walk = {head, (elems - head) / pack_elems, elems};
  return true;
}

// Returns a walk of single elements.
inline Walk WalkElements(uint64_t elems) { return {0, elems, elems}; }

// Each thread takes this many packs at once, so that enough reads are in flight to keep memory
// busy.
template <int kPackElems>
inline constexpr int kPacksPerThread = kPackElems == 1   ? 8
                                       : kPackElems == 8 ? 2
                                                         : 4;

// Returns how many blocks WalkBlock needs.
template <int kThreads, int kPackElems>
constexpr uint64_t BlocksOfWalk(const Walk& walk) {
  constexpr uint64_t kPerBlock = uint64_t{kThreads} * kPacksPerThread<kPackElems>;
  const uint64_t blocks = (walk.packs + kPerBlock - 1) / kPerBlock;
  return blocks == 0 && walk.elems > 0 ? 1 : blocks;
}

// Calls visit.operator()<kPacks, kElems>(first, stride) for the elements of this thread: kPacks
// packs of kElems elements, which begin with number first, first + stride, ….
template <int kThreads, int kPackElems, class Thread, class Visit>
THALWEG_DEVICE inline void WalkBlock(const Thread& thread, const Walk& walk, const Visit& visit) {
  constexpr int kPacks = kPacksPerThread<kPackElems>;
  constexpr uint64_t kStride = uint64_t{kThreads} * kPackElems;
  const uint64_t begin = uint64_t{thread.Block()} * kThreads * kPacks;
  const uint64_t pack = begin + thread.Index();
  const uint64_t first = walk.head + pack * kPackElems;
  if (begin + kThreads * kPacks <= walk.packs) {
    visit.template operator()<kPacks, kPackElems>(first, kStride);
  } else {
    for (int p = 0; p < kPacks; ++p) {
      if (pack + p * kThreads < walk.packs) {
        visit.template operator()<1, kPackElems>(first + p * kStride, kStride);
      }
    }
  }
  if constexpr (kPackElems > 1) {
    const uint64_t tail = walk.head + walk.packs * kPackElems;
    const uint64_t single = thread.Index();
    if (thread.Block() == 0 && single < walk.head + (walk.elems - tail)) {
      visit.template operator()<1, 1>(single < walk.head ? single : tail + single - walk.head, 0);
    }
  }
}

}  // namespace thalweg
