// What the benchmarks of the CUDA kernels have in common: memory on the GPU, and time beside that
// of a copy on the same GPU in the same run.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "kernels/cuda/stream.h"

namespace thalweg {

// End the program with a message unless all is well.
void Require(cudaError_t error, const char* what);
void Require(const absl::Status& status);

// Device memory, zero at first. One thread.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(uint64_t elems) : elems_(elems) {
    void* memory = nullptr;
    Require(cudaMalloc(&memory, bytes()), "cudaMalloc");
    memory_.reset(static_cast<T*>(memory));
    Require(cudaMemset(memory, 0, bytes()), "cudaMemset");
  }
  explicit DeviceArray(std::span<const T> content) : DeviceArray(content.size()) {
    Require(cudaMemcpy(get(), content.data(), bytes(), cudaMemcpyHostToDevice),
            "copying to the GPU");
  }

  T* get() const { return memory_.get(); }
  uint64_t bytes() const { return elems_ * sizeof(T); }

 private:
  struct Free {
    void operator()(T* memory) const { cudaFree(memory); }
  };

  uint64_t elems_;
  std::unique_ptr<T, Free> memory_;
};

// Measures on GPU 0 and prints one JSON to standard output: begun with a case "copy" when this is
// made, ended when it is destroyed. Ends the program when there is no GPU. One thread.
// A program's one argument, if it has any, names the only case besides the copy: a profiler has the
// kernels of that one to itself.
class Bench {
 public:
  // Work that is launched in a stream.
  using Work = std::function<absl::Status(CudaStream)>;

  Bench(int argc, char** argv);
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;
  ~Bench();

  // Prints a case: the bytes that `work` cannot do without reading or writing, the time of the
  // median repetition, their rate and its share of the copy's, and how often `work` launches.
  // Nothing of a case that was not asked for.
  void Run(const std::string& name, uint64_t bytes, const Work& work);

 private:
  float MedianMs(const Work& work) const;

  const std::string only_;  // empty: all
  bool was_met_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
  double copy_rate_ = 0;
};

}  // namespace thalweg
