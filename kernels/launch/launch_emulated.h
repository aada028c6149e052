// This header implements Launch() on the emulator; it is part of kernels/launch/launch.h.
//
// The emulator tests a kernel's logic: which element each thread reads and writes, that barriers
// suffice for the order in which threads run, and that no thread misses one. It shows neither speed
// nor conflicts of two warps that write one address at the same time.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>

#include "kernels/launch/emulated_streams.h"
#include "kernels/launch/emulator.h"
#include "kernels/launch/stream.h"

namespace thalweg {

class EmulatedThread {
 public:
  explicit EmulatedThread(Emulator& emulator) : emulator_(emulator), index_(emulator.thread()) {}

  uint32_t Index() const { return index_; }
  uint32_t Block() const { return emulator_.block(); }
  uint32_t Blocks() const { return emulator_.blocks(); }
  uint32_t Lane() const { return index_ % kWarpThreads; }
  uint32_t Warp() const { return index_ / kWarpThreads; }

  void SyncBlock() const { emulator_.SyncBlock(); }
  void SyncWarp() const { emulator_.ExchangeInWarp("SyncWarp", 0); }

  template <class T>
  T Shuffle(T value, uint32_t lane) const {
    return Exchange("Shuffle", value, lane % kWarpThreads);
  }
  // Like CUDA's: a lane whose source is not in the warp keeps its own value.
  template <class T>
  T ShuffleUp(T value, uint32_t lanes) const {
    return Exchange("ShuffleUp", value, Lane() >= lanes ? Lane() - lanes : Lane());
  }
  template <class T>
  T ShuffleDown(T value, uint32_t lanes) const {
    return Exchange("ShuffleDown", value, Lane() + lanes < kWarpThreads ? Lane() + lanes : Lane());
  }
  template <class T>
  T ShuffleXor(T value, uint32_t mask) const {
    return Exchange("ShuffleXor", value, (Lane() ^ mask) % kWarpThreads);
  }
  uint32_t Ballot(bool predicate) const {
    const uint64_t* values = emulator_.ExchangeInWarp("Ballot", predicate ? 1 : 0);
    uint32_t bits = 0;
    for (uint32_t lane = 0; lane < kWarpThreads; ++lane) {
      bits |= static_cast<uint32_t>(values[lane]) << lane;
    }
    return bits;
  }

  template <class T>
  T Add(T* counter, T value) const {
    return std::atomic_ref<T>(*counter).fetch_add(value, std::memory_order_relaxed);
  }

 private:
  template <class T>
  T Exchange(const char* name, T value, uint32_t from) const {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= sizeof(uint64_t));
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(value));
    const uint64_t* values = emulator_.ExchangeInWarp(name, bits);
    std::memcpy(&value, &values[from], sizeof(value));
    return value;
  }

  Emulator& emulator_;
  uint32_t index_;
};

template <class Kernel>
[[nodiscard]] LaunchError RunBlocks(uint64_t blocks, const typename Kernel::Args& args) {
  using Shared = typename Kernel::Shared;
  // Shared memory is on the heap with its exact size, so that AddressSanitizer sees an access one
  // byte beyond it.
  const auto shared = std::make_unique_for_overwrite<Shared>();
  Emulator& emulator = Emulator::Get();
  return emulator.Run(
      static_cast<uint32_t>(blocks), Kernel::kThreads,
      // A block finds arbitrary bytes in shared memory.
      [&] { std::memset(static_cast<void*>(shared.get()), kGarbage, sizeof(Shared)); },
      [&] { Kernel::Run(EmulatedThread(emulator), *shared, args); });
}

// Runs `blocks` blocks of Kernel, one after the other, before it returns, or when the stream
// reaches them (emulated_streams.h). Only one thread at a time may call it.
template <class Kernel>
[[nodiscard]] LaunchError Launch(CudaStream stream, uint64_t blocks,
                                 const typename Kernel::Args& args) {
  static_assert(Kernel::kThreads % kWarpThreads == 0 && Kernel::kThreads <= 1024);
  static_assert(std::is_trivially_default_constructible_v<typename Kernel::Shared>);
  return RunOnStream(stream, [=] { return RunBlocks<Kernel>(blocks, args); });
}

[[nodiscard]] inline LaunchError FillZero(CudaStream stream, void* memory, uint64_t bytes) {
  if (bytes == 0) return 0;
  return RunOnStream(stream, [=] {
    Emulator::Get().CountLaunch();
    std::memset(memory, 0, bytes);
    return 0;
  });
}

[[nodiscard]] inline LaunchError CopyOnDevice(CudaStream stream, const void* in, void* out,
                                              uint64_t bytes) {
  if (bytes == 0) return 0;
  return RunOnStream(stream, [=] {
    Emulator::Get().CountLaunch();
    std::memcpy(out, in, bytes);
    return 0;
  });
}

}  // namespace thalweg
