// This header is for the kernels of passes 1 and 3: it defines how the threads of a block walk a
// tile of rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/codec/powersgd/powersgd_launch.h"
#include "kernels/launch/host_device.h"
#include "kernels/launch/pack.h"

namespace thalweg {

// Floats holds kWide contiguous elements: 1, or 4 at a multiple of 16 bytes.
template <int kWide>
struct Floats {
  float at[kWide];
};

template <int kWide>
THALWEG_DEVICE inline Floats<kWide> LoadFloats(const float* from) {
  Floats<kWide> floats;
  if constexpr (kWide == 1) {
    floats.at[0] = *from;
  } else {
    const Bytes16 bytes = Load16(from);
    std::memcpy(&floats, &bytes, sizeof(floats));
  }
  return floats;
}

template <int kWide>
THALWEG_DEVICE inline void StoreFloats(const Floats<kWide>& floats, float* to) {
  if constexpr (kWide == 1) {
    *to = floats.at[0];
  } else {
    Bytes16 bytes;
    std::memcpy(&bytes, &floats, sizeof(floats));
    Store16(bytes, to);
  }
}

// Returns whether rows of `cols` elements from `array` on begin at multiples of 16 bytes; true for
// null.
THALWEG_DEVICE inline bool HasWideRows(const float* array, uint64_t cols) {
  return cols % 4 == 0 && reinterpret_cast<uintptr_t>(array) % 16 == 0;
}

// Returns `array` from element `offset` on, or null.
template <class T>
THALWEG_DEVICE inline T* From(T* array, uint64_t offset) {
  return array == nullptr ? nullptr : array + offset;
}

// Returns how many columns of a factor one walk handles: 8, 4, 2 or 1.
THALWEG_DEVICE inline uint32_t ColumnsAtOnce(uint32_t left) {
  return left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
}

// A RowGroup is up to kRowsAtOnce rows that some threads of a block walk together; this thread is
// number `lane` of them.
struct RowGroup {
  uint64_t first;
  uint32_t count;  // 0 beyond the tile
  uint32_t lane;
  uint32_t lanes;
};

// Calls visit(RowGroup) until all rows of the tile are visited; all threads call it equally often.
template <class Thread, class Visit>
THALWEG_DEVICE inline void ForEachRowGroup(const Thread& thread, const PowerSgdTile& tile,
                                           const Visit& visit) {
  const uint32_t at_once = kPowerSgdThreads / tile.lanes * kRowsAtOnce;
  const uint32_t mine = thread.Index() / tile.lanes * kRowsAtOnce;
  for (uint64_t begin = tile.begin; begin < tile.end; begin += at_once) {
    const uint64_t first = begin + mine;
    const uint64_t left = first < tile.end ? tile.end - first : 0;
    const auto count = static_cast<uint32_t>(left < kRowsAtOnce ? left : kRowsAtOnce);
    visit(RowGroup{first, count, thread.Index() % tile.lanes, tile.lanes});
  }
}

}  // namespace thalweg
