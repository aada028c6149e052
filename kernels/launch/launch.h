// Launch() runs a kernel that is written once on a GPU (compiled by nvcc) or on the emulator
// (compiled as C++). A kernel is a type:
//
//   struct Negate {
//     static constexpr uint32_t kThreads = 256;  // in a block, a multiple of 32
//     static constexpr uint32_t kBlocksAtOnce = 3;  // may be left out; see launch_cuda.h
//     struct Shared {};                          // the block's shared memory; trivial
//     struct Args { float* values; uint64_t elems; };  // by value; at most 4 KiB
//     template <class Thread>
//     THALWEG_DEVICE static void Run(const Thread& thread, Shared& shared, const Args& args);
//   };
//   LaunchError error = Launch<Negate>(stream, blocks, {values, elems});
//
// `Thread` has, with the meaning of CUDA's names in brackets:
//
//   Index(), Block(), Blocks()       [threadIdx.x, blockIdx.x, gridDim.x]
//   Lane(), Warp()                   Index() % 32, Index() / 32
//   SyncBlock(), SyncWarp()          [__syncthreads, __syncwarp]
//   Shuffle(value, lane)             [__shfl_sync]
//   ShuffleUp(value, lanes), ShuffleDown(value, lanes), ShuffleXor(value, mask)
//   Ballot(bool)                     [__ballot_sync]; != 0 is any, == ~0u is all
//   Add(counter, value)              [atomicAdd] on uint32_t and uint64_t; returns what was there
//
// Everything a warp does together needs all its 32 threads, everything a block does together all of
// them: no thread may have returned or wait elsewhere.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/launch/host_device.h"
#include "kernels/launch/stream.h"

#if defined(__CUDACC__)
#include "kernels/launch/launch_cuda.h"
#else
#include "kernels/launch/launch_emulated.h"
#endif

namespace thalweg {

// Returns how many blocks cover `items` when each block takes `per_block`, for one kind of
// launches.
THALWEG_HD constexpr uint64_t BlocksFor(uint64_t items, uint64_t per_block) {
  return (items + per_block - 1) / per_block;
}

}  // namespace thalweg
