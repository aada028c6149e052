// This header connects topk_cuda.cc, which checks arguments, and topk_cuda.cu, which has the
// kernels.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/codec/encoded.h"
#include "kernels/launch/stream.h"

namespace thalweg {

// A warp handles this many elements together.
inline constexpr uint64_t kTopKTileElems = 1024;

// Magnitudes of 31 bits are compared by their upper 11 bits, then the middle 10, then the lower 10.
inline constexpr uint32_t kUpperBins = 2048;
inline constexpr uint32_t kLaterBins = 1024;

// A TopKCut says which elements are chosen: all in bins above `bin`, and `taken` of those in it.
struct TopKCut {
  uint32_t bin;
  uint32_t taken;
};

struct TopKState {
  uint32_t upper[kUpperBins];  // number of elements in each bin, without zeros
  uint32_t middle[kLaterBins];
  uint32_t lower[kLaterBins];
  uint32_t chosen;
  uint32_t nonfinite;
  TopKCut cut[3];  // by the upper bits, by the upper 21, by all
};

// A TopKTile describes the candidates in a tile: elements whose upper bits put them at the cut or
// above.
struct TopKTile {
  uint32_t candidates;
  uint32_t equal;  // number with the smallest chosen magnitude; later, the number before this tile
  uint32_t first;  // index of the first chosen
  uint32_t next;   // index of the last chosen + 1, or 0; later, that of the tiles before
  uint64_t bytes;  // bytes of the chosen entries; later, where they begin
};

struct TopKWork {
  const float* values;
  float* residual;  // may be null
  uint64_t elems;
  uint32_t wanted;
  std::byte* out;
  Encoded* encoded;
  // In the scratch memory:
  TopKState* state;
  TopKTile* tiles;
  uint32_t* bits;     // candidates' bits, each tile's from its number · kTopKTileElems on
  uint16_t* offsets;  // candidates' positions in their tiles
};

LaunchError LaunchEncodeTopK(CudaStream stream, const TopKWork& work);
LaunchError LaunchScatterTopK(CudaStream stream, const uint32_t* indices, const float* values,
                              uint64_t count, float* out, uint64_t elems);

}  // namespace thalweg
