// This header is for the kernels of the formats of blocks: a warp takes a block of a payload, which
// is a scale followed by the bytes of its elements.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/launch/host_device.h"
#include "kernels/launch/launch.h"
#include "kernels/launch/pack.h"

namespace thalweg {

inline constexpr uint32_t kBlockKernelThreads = 256;
inline constexpr uint32_t kWarpsOfBlockKernel = kBlockKernelThreads / 32;

// A BlockPlace locates the block of a warp.
struct BlockPlace {
  uint64_t first;   // its first element
  uint32_t elems;   // 0 beyond the last block
  uint64_t offset;  // its first byte in the payload
};

// Locates number `which` of the kPerWarp blocks that a warp takes.
template <uint64_t kBlockElems, uint64_t kBlockBytes, uint32_t kPerWarp = 1, class Thread>
THALWEG_DEVICE inline BlockPlace PlaceOf(const Thread& thread, uint64_t elems, uint32_t which = 0) {
  const uint64_t warp = uint64_t{thread.Block()} * kWarpsOfBlockKernel + thread.Warp();
  const uint64_t block = warp * kPerWarp + which;
  const uint64_t first = block * kBlockElems;
  const uint64_t left = first < elems ? elems - first : 0;
  const uint64_t here = left < kBlockElems ? left : kBlockElems;
  return {first, static_cast<uint32_t>(here), block * kBlockBytes};
}

template <uint64_t kBlockElems, uint32_t kPerWarp = 1>
constexpr uint64_t BlocksOfBlockKernel(uint64_t elems) {
  return BlocksFor(BlocksFor(elems, kBlockElems), kWarpsOfBlockKernel * kPerWarp);
}

// Returns the four bytes from number `at` on, as far as a block has them; `aligned` when the
// payload lies at a multiple of 4.
THALWEG_DEVICE inline uint32_t LoadBlockWord(const std::byte* bytes, uint32_t at, uint32_t size,
                                             bool aligned) {
  if (at + 4 <= size) return LoadWord(bytes + at, aligned);
  uint32_t word = 0;
  for (uint32_t b = 0; at + b < size; ++b) word |= static_cast<uint32_t>(bytes[at + b]) << (8 * b);
  return word;
}

THALWEG_DEVICE inline void StoreBlockWord(uint32_t word, std::byte* bytes, uint32_t at,
                                          uint32_t size, bool aligned) {
  if (at + 4 <= size) return StoreWord(word, bytes + at, aligned);
  for (; at < size; ++at, word >>= 8) bytes[at] = static_cast<std::byte>(word);
}

}  // namespace thalweg
