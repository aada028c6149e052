// Between topk_cuda.cc, which checks arguments, and topk_cuda.cu, which has the kernels.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/codec/encoded.h"
#include "kernels/cuda/stream.h"

namespace thalweg {

// Elements that a warp looks at together.
inline constexpr uint64_t kTopKTileElems = 1024;

// Magnitudes, of 31 bits, are told apart by their upper 11, then the middle 10, then the lower 10.
inline constexpr uint32_t kUpperBins = 2048;
inline constexpr uint32_t kLaterBins = 1024;

// Which elements are chosen: all in bins above `bin`, and `taken` of those in it.
struct TopKCut {
  uint32_t bin;
  uint32_t taken;
};

struct TopKState {
  uint32_t upper[kUpperBins];  // how many elements, zeros left out, are in each bin
  uint32_t middle[kLaterBins];
  uint32_t lower[kLaterBins];
  uint32_t chosen;
  uint32_t nonfinite;
  TopKCut cut[3];  // by the upper bits, by the upper 21, by all
};

// Of the candidates in a tile: those whose upper bits put them at the cut or above.
struct TopKTile {
  uint32_t candidates;
  uint32_t equal;  // how many have the least magnitude chosen; then, how many before this tile
  uint32_t first;  // index of the first chosen
  uint32_t next;   // index of the last chosen + 1, 0 without; then, that of the tiles before
  uint64_t bytes;  // of the entries chosen; then, where they begin
};

struct TopKWork {
  const float* values;
  float* residual;  // or null
  uint64_t elems;
  uint32_t wanted;
  std::byte* out;
  Encoded* encoded;
  // In the scratch memory:
  TopKState* state;
  TopKTile* tiles;
  uint32_t* bits;     // of candidates, each tile's from its number · kTopKTileElems on
  uint16_t* offsets;  // of candidates in their tiles
};

LaunchError LaunchEncodeTopK(CudaStream stream, const TopKWork& work);
LaunchError LaunchScatterTopK(CudaStream stream, const uint32_t* indices, const float* values,
                              uint64_t count, float* out, uint64_t elems);

}  // namespace thalweg
