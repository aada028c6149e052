// This header computes sums and maxima over the threads of a warp or a block.
#pragma once

#include <cstdint>

#include "kernels/launch/host_device.h"

namespace thalweg {

struct SumOf {
  template <class T>
  THALWEG_DEVICE T operator()(T a, T b) const {
    return a + b;
  }
};

struct MaxOf {
  template <class T>
  THALWEG_DEVICE T operator()(T a, T b) const {
    return a < b ? b : a;
  }
};

template <class T>
struct ScanResult {
  T before;  // over the threads before this one; 0 for the first
  T all;
};

// Combines the `value`s of the threads of a warp, 0 being neutral.
template <class Thread, class T, class Combine>
THALWEG_DEVICE inline ScanResult<T> ScanWarp(const Thread& thread, T value, Combine combine) {
  for (uint32_t lanes = 1; lanes < 32; lanes *= 2) {
    const T other = thread.ShuffleUp(value, lanes);
    if (thread.Lane() >= lanes) value = combine(other, value);
  }
  const T before = thread.ShuffleUp(value, 1);
  return {thread.Lane() == 0 ? T{0} : before, thread.Shuffle(value, 31)};
}

// Does the same for a block of kThreads, which shares `warps`, one for each warp. All threads must
// call it; `warps` may be reused when it returns.
template <int kThreads, class Thread, class T, class Combine>
THALWEG_DEVICE inline ScanResult<T> ScanBlock(const Thread& thread, T* warps, T value,
                                              Combine combine) {
  const ScanResult<T> in_warp = ScanWarp(thread, value, combine);
  if (thread.Lane() == 0) warps[thread.Warp()] = in_warp.all;
  thread.SyncBlock();
  ScanResult<T> result{0, 0};
  for (uint32_t warp = 0; warp < kThreads / 32; ++warp) {
    if (warp == thread.Warp()) result.before = combine(result.all, in_warp.before);
    result.all = combine(result.all, warps[warp]);
  }
  thread.SyncBlock();
  return result;
}

// Adds the `count`s of a warp's threads to `*total`, which is in global memory.
template <class Thread>
THALWEG_DEVICE inline void AddInWarp(const Thread& thread, uint32_t count, uint64_t* total) {
  if (thread.Ballot(count != 0) == 0) return;
  for (uint32_t lanes = 16; lanes > 0; lanes /= 2) count += thread.ShuffleDown(count, lanes);
  if (thread.Lane() == 0) thread.Add(total, uint64_t{count});
}

}  // namespace thalweg
