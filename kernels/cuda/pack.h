// Walking arrays in packs of 16 bytes, the widest access that a thread of a GPU has.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/host_device.h"

namespace thalweg {

// Elements [0, head) are walked one by one, then come `packs` packs, then what is left of `elems`.
struct Walk {
  uint64_t head = 0;
  uint64_t packs = 0;
  uint64_t elems = 0;
};

// Sets `walk` such that packs of `pack_elems` elements begin at multiples of 16 bytes in the array
// `narrow` and in all of `others`, and returns true; false when they lie so that no such walk
// exists. Requires that packs are a multiple of 16 bytes in every array, arrays are aligned to
// their elements, and those of `others` are not smaller than those of `narrow`.
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

// One by one.
inline Walk WalkElements(uint64_t elems) { return {0, elems, elems}; }

// kElems elements in registers.
template <class Element, int kElems>
struct Pack {
  typename Element::Bits bits[kElems];
};

struct alignas(16) Bytes16 {
  uint32_t words[4];
};

THALWEG_DEVICE inline Bytes16 Load16(const void* from) {
#if defined(__CUDA_ARCH__)
  const uint4 loaded = *static_cast<const uint4*>(from);
  return {{loaded.x, loaded.y, loaded.z, loaded.w}};
#else
  return *static_cast<const Bytes16*>(from);
#endif
}

THALWEG_DEVICE inline void Store16(const Bytes16& bytes, void* to) {
#if defined(__CUDA_ARCH__)
  *static_cast<uint4*>(to) =
      make_uint4(bytes.words[0], bytes.words[1], bytes.words[2], bytes.words[3]);
#else
  *static_cast<Bytes16*>(to) = bytes;
#endif
}

// The elements from number `first` of `array`: one, or a pack that begins at a multiple of 16
// bytes.
template <class Element, int kElems>
THALWEG_DEVICE inline Pack<Element, kElems> LoadPack(const void* array, uint64_t first) {
  using Bits = typename Element::Bits;
  Pack<Element, kElems> pack;
  const Bits* const from = static_cast<const Bits*>(array) + first;
  if constexpr (kElems == 1) {
    pack.bits[0] = *from;
  } else {
    constexpr int kStep = 16 / sizeof(Bits);
    for (int i = 0; i < kElems; i += kStep) {
      const Bytes16 bytes = Load16(from + i);
      std::memcpy(&pack.bits[i], &bytes, sizeof(bytes));
    }
  }
  return pack;
}

template <class Element, int kElems>
THALWEG_DEVICE inline void StorePack(const Pack<Element, kElems>& pack, void* array,
                                     uint64_t first) {
  using Bits = typename Element::Bits;
  Bits* const to = static_cast<Bits*>(array) + first;
  if constexpr (kElems == 1) {
    *to = pack.bits[0];
  } else {
    constexpr int kStep = 16 / sizeof(Bits);
    for (int i = 0; i < kElems; i += kStep) {
      Bytes16 bytes;
      std::memcpy(&bytes, &pack.bits[i], sizeof(bytes));
      Store16(bytes, to + i);
    }
  }
}

// How many packs each thread takes at once, so that enough reads are under way to keep memory busy.
template <int kPackElems>
inline constexpr int kPacksPerThread = kPackElems == 1 ? 8 : 2;

// How many blocks WalkBlock needs.
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

// A word at any address; `aligned` when that is a multiple of 4.
THALWEG_DEVICE inline uint32_t LoadWord(const std::byte* from, bool aligned) {
  if (aligned) return *reinterpret_cast<const uint32_t*>(from);
  uint32_t word;
  std::memcpy(&word, from, sizeof(word));
  return word;
}

THALWEG_DEVICE inline void StoreWord(uint32_t word, std::byte* to, bool aligned) {
  if (aligned) {
    *reinterpret_cast<uint32_t*>(to) = word;
  } else {
    std::memcpy(to, &word, sizeof(word));
  }
}

inline bool IsAligned(const void* pointer, size_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

// Adds the `count`s of a warp's threads to `*total`, which is in global memory.
template <class Thread>
THALWEG_DEVICE inline void AddInWarp(const Thread& thread, uint32_t count, uint64_t* total) {
  if (thread.Ballot(count != 0) == 0) return;
  for (uint32_t lanes = 16; lanes > 0; lanes /= 2) count += thread.ShuffleDown(count, lanes);
  if (thread.Lane() == 0) thread.Add(total, uint64_t{count});
}

}  // namespace thalweg
