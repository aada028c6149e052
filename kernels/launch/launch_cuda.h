// This header implements Launch() on a GPU; it is part of kernels/launch/launch.h.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "kernels/launch/stream.h"

namespace thalweg {

class CudaThread {
 public:
  __device__ uint32_t Index() const { return threadIdx.x; }
  __device__ uint32_t Block() const { return blockIdx.x; }
  __device__ uint32_t Blocks() const { return gridDim.x; }
  __device__ uint32_t Lane() const { return threadIdx.x % 32; }
  __device__ uint32_t Warp() const { return threadIdx.x / 32; }

  __device__ void SyncBlock() const { __syncthreads(); }
  __device__ void SyncWarp() const { __syncwarp(); }

  template <class T>
  __device__ T Shuffle(T value, uint32_t lane) const {
    return __shfl_sync(kAllLanes, value, static_cast<int>(lane));
  }
  template <class T>
  __device__ T ShuffleUp(T value, uint32_t lanes) const {
    return __shfl_up_sync(kAllLanes, value, lanes);
  }
  template <class T>
  __device__ T ShuffleDown(T value, uint32_t lanes) const {
    return __shfl_down_sync(kAllLanes, value, lanes);
  }
  template <class T>
  __device__ T ShuffleXor(T value, uint32_t mask) const {
    return __shfl_xor_sync(kAllLanes, value, static_cast<int>(mask));
  }
  __device__ uint32_t Ballot(bool predicate) const { return __ballot_sync(kAllLanes, predicate); }

  __device__ uint32_t Add(uint32_t* counter, uint32_t value) const {
    return atomicAdd(counter, value);
  }
  __device__ uint64_t Add(uint64_t* counter, uint64_t value) const {
    static_assert(sizeof(unsigned long long) == sizeof(uint64_t));
    return atomicAdd(reinterpret_cast<unsigned long long*>(counter), value);
  }

 private:
  static constexpr uint32_t kAllLanes = 0xffffffffu;
};

// A multiprocessor must have registers for this many threads of a kernel, unless the kernel says
// how many blocks in kBlocksAtOnce: the reads of fewer do not keep the memory busy.
inline constexpr uint32_t kThreadsAtOnce = 512;

template <class Kernel>
constexpr uint32_t BlocksAtOnce() {
  if constexpr (requires { Kernel::kBlocksAtOnce; }) {
    return Kernel::kBlocksAtOnce;
  } else {
    return (kThreadsAtOnce + Kernel::kThreads - 1) / Kernel::kThreads;
  }
}

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, BlocksAtOnce<Kernel>())
    RunKernel(const __grid_constant__ typename Kernel::Args args) {
  __shared__ typename Kernel::Shared shared;
  Kernel::Run(CudaThread(), shared, args);
}

// Starts `blocks` blocks of Kernel on `stream`, none when that is 0. Does not wait. Thread-safe.
template <class Kernel>
[[nodiscard]] LaunchError Launch(CudaStream stream, uint64_t blocks,
                                 const typename Kernel::Args& args) {
  static_assert(Kernel::kThreads % 32 == 0 && Kernel::kThreads <= 1024);
  static_assert(std::is_trivially_default_constructible_v<typename Kernel::Shared>);
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffffu) return cudaErrorInvalidConfiguration;
  RunKernel<Kernel><<<static_cast<unsigned>(blocks), Kernel::kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

[[nodiscard]] inline LaunchError FillZero(CudaStream stream, void* memory, uint64_t bytes) {
  return bytes == 0 ? cudaSuccess : cudaMemsetAsync(memory, 0, bytes, stream);
}

// Copies; the two must not overlap.
[[nodiscard]] inline LaunchError CopyOnDevice(CudaStream stream, const void* in, void* out,
                                              uint64_t bytes) {
  return bytes == 0 ? cudaSuccess
                    : cudaMemcpyAsync(out, in, bytes, cudaMemcpyDeviceToDevice, stream);
}

}  // namespace thalweg
