// This header reads and writes several elements at once: packs of 8 bytes or of multiples of 16,
// the widest access of a GPU thread, and words.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/launch/host_device.h"

#if !defined(__CUDACC__)
#include "kernels/launch/emulator.h"
#endif

namespace thalweg {

// A Pack is kElems elements in registers.
template <class Element, int kElems>
struct Pack {
  typename Element::Bits bits[kElems];
};

#if !defined(__CUDACC__)
inline void NoteAccess(const void* at, uint32_t bytes, bool writes) {
  Emulator::Get().NoteAccess(at, bytes, writes);
}
#endif

struct alignas(16) Bytes16 {
  uint32_t words[4];
};

THALWEG_DEVICE inline Bytes16 Load16(const void* from) {
#if defined(__CUDACC__)
  const uint4 loaded = *static_cast<const uint4*>(from);
  return {{loaded.x, loaded.y, loaded.z, loaded.w}};
#else
  NoteAccess(from, 16, false);
  return *static_cast<const Bytes16*>(from);
#endif
}

THALWEG_DEVICE inline void Store16(const Bytes16& bytes, void* to) {
#if defined(__CUDACC__)
  *static_cast<uint4*>(to) =
      make_uint4(bytes.words[0], bytes.words[1], bytes.words[2], bytes.words[3]);
#else
  NoteAccess(to, 16, true);
  *static_cast<Bytes16*>(to) = bytes;
#endif
}

struct alignas(8) Bytes8 {
  uint32_t words[2];
};

THALWEG_DEVICE inline Bytes8 Load8(const void* from) {
#if defined(__CUDACC__)
  const uint2 loaded = *static_cast<const uint2*>(from);
  return {{loaded.x, loaded.y}};
#else
  NoteAccess(from, 8, false);
  return *static_cast<const Bytes8*>(from);
#endif
}

THALWEG_DEVICE inline void Store8(const Bytes8& bytes, void* to) {
#if defined(__CUDACC__)
  *static_cast<uint2*>(to) = make_uint2(bytes.words[0], bytes.words[1]);
#else
  NoteAccess(to, 8, true);
  *static_cast<Bytes8*>(to) = bytes;
#endif
}

// Returns the elements from number `first` of `array`: one, or a pack that begins at a multiple of
// 16 bytes, or of 8 if it has no more.
template <class Element, int kElems>
THALWEG_DEVICE inline Pack<Element, kElems> LoadPack(const void* array, uint64_t first) {
  using Bits = typename Element::Bits;
  Pack<Element, kElems> pack;
  const Bits* const from = static_cast<const Bits*>(array) + first;
  if constexpr (kElems == 1) {
    pack.bits[0] = *from;
  } else if constexpr (sizeof(pack) == sizeof(Bytes8)) {
    const Bytes8 bytes = Load8(from);
    std::memcpy(&pack, &bytes, sizeof(bytes));
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

// Returns a word at any address; `aligned` when that is a multiple of 4.
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

}  // namespace thalweg
