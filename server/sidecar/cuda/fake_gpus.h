// FakeGpus are GPUs for tests: the test can hold their streams, kernels run on the emulator when a
// stream reaches them, and workers share memory of theirs with the sidecar.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/device/fake_runtime.h"
#include "kernels/launch/emulated_streams.h"
#include "server/sidecar/cuda/cuda_device.h"

namespace thalweg {

// Only one may exist at a time.
class FakeGpus {
 public:
  explicit FakeGpus(int count) {
    for (int i = 0; i < count; ++i) gpus_.push_back(std::make_shared<FakeRuntime>(true, i + 1));
    SetEmulatedQueue([this](CudaStream stream, const std::function<void()>& kernel) {
      // A launch goes to the current GPU, which the caller has bound.
      for (const auto& gpu : gpus_) {
        if (gpu->IsBound()) gpu->RunInPlace(reinterpret_cast<DeviceStream>(stream), kernel);
      }
    });
  }
  ~FakeGpus() {
    Settle();
    for (const auto& gpu : gpus_) EXPECT_EQ(gpu->violations(), std::vector<std::string>());
    SetEmulatedQueue(nullptr);
  }

  FakeRuntime& operator[](size_t i) { return *gpus_[i]; }
  std::shared_ptr<FakeRuntime> Share(size_t i) { return gpus_[i]; }
  std::vector<std::shared_ptr<DeviceRuntime>> All() const { return {gpus_.begin(), gpus_.end()}; }
  const std::vector<std::shared_ptr<FakeRuntime>>& runtimes() const { return gpus_; }
  // All settle together: progress of one may let another continue.
  void Settle() {
    uint64_t before = 0;
    do {
      before = WorkDone();
      for (const auto& gpu : gpus_) gpu->Settle();
    } while (WorkDone() != before);
  }

 private:
  uint64_t WorkDone() const {
    uint64_t done = 0;
    for (const auto& gpu : gpus_) done += gpu->work_done();
    return done;
  }

  std::vector<std::shared_ptr<FakeRuntime>> gpus_;
};

// A FakeGpuWorker is a worker's memory of one bucket, and its stream.
class FakeGpuWorker {
 public:
  FakeGpuWorker(FakeRuntime& gpu, size_t bytes) : gpu_(gpu), bytes_(bytes) {
    EXPECT_TRUE(gpu_.BindThread().ok());
    stream_ = *gpu_.CreateStream();
    made_ = *gpu_.CreateSharedEvent();
    memory_ = static_cast<std::byte*>(*gpu_.AllocateMemory(kSharedMemoryGranule));
  }
  ~FakeGpuWorker() {
    gpu_.Settle();
    gpu_.Abandon(memory_);
  }

  DeviceStream stream() const { return stream_; }
  DeviceMemory Share() {
    EXPECT_TRUE(gpu_.BindThread().ok());
    return {gpu_.uuid(), *gpu_.ShareMemory(memory_), *gpu_.ShareEvent(made_)};
  }
  // Queues the computation of the gradient.
  template <class T>
  void Make(std::vector<T> gradient) {
    ASSERT_EQ(gradient.size() * sizeof(T), bytes_);
    ASSERT_TRUE(gpu_.BindThread().ok());
    std::byte* const inside = gpu_.Inside({memory_, bytes_}).data();
    gpu_.Run(stream_, [inside, gradient = std::move(gradient)] {
      std::memcpy(inside, gradient.data(), gradient.size() * sizeof(T));
    });
    ASSERT_TRUE(gpu_.Record(made_, stream_).ok());
  }
  // Sets `*reached` when its stream finds the result complete.
  void WaitForResult(const DeviceMemory& result, bool* reached) {
    ASSERT_TRUE(gpu_.BindThread().ok());
    ASSERT_TRUE(gpu_.Wait(stream_, *gpu_.OpenEvent(result.event)).ok());
    gpu_.Run(stream_, [reached] { *reached = true; });
  }
  // Returns what its stream sees in the result after it has waited for the event.
  template <class T>
  std::vector<T> Fetch(const DeviceMemory& result, size_t elems) {
    EXPECT_TRUE(gpu_.BindThread().ok());
    auto* const memory = static_cast<std::byte*>(*gpu_.OpenMemory(result.memory));
    const DeviceEvent event = *gpu_.OpenEvent(result.event);
    EXPECT_TRUE(gpu_.Wait(stream_, event).ok());
    std::vector<T> values(elems);
    const std::byte* const inside = gpu_.Inside({memory, elems * sizeof(T)}).data();
    gpu_.Run(stream_, [&] { std::memcpy(values.data(), inside, elems * sizeof(T)); });
    gpu_.Settle();
    gpu_.CloseMemory(memory);
    return values;
  }

 private:
  FakeRuntime& gpu_;
  const size_t bytes_;
  DeviceStream stream_ = nullptr;
  DeviceEvent made_ = nullptr;
  std::byte* memory_ = nullptr;
};

}  // namespace thalweg
