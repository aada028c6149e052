// This header is for the benchmarks of the CUDA kernels: memory on the GPU, and time compared with
// a copy on the same GPU in the same run.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "kernels/launch/stream.h"

namespace thalweg {

// Both end the program with a message unless the call succeeded.
void Require(cudaError_t error, const char* what);
void Require(const absl::Status& status);

// A DeviceArray is device memory, zero at first. Only one thread may use it.
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

// A Bench measures on GPU 0 and prints one JSON to standard output: the constructor begins it with
// a case "copy", the destructor ends it. It ends the program when there is no GPU. Only one thread
// may use it. A program's optional argument names the only case besides the copy, so that a
// profiler sees only its kernels.
class Bench {
 public:
  // A Work launches work in a stream.
  using Work = std::function<absl::Status(CudaStream)>;

  Bench(int argc, char** argv);
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;
  ~Bench();

  // Measures and prints a case: the bytes that `work` must at least read or write, the time of the
  // median repetition, their rate and its ratio to the copy's, and how often `work` launches.
  // Prints nothing for a case that was not asked for.
  void Run(const std::string& name, uint64_t bytes, const Work& work);

 private:
  float MedianMs(const Work& work) const;

  const std::string only_;  // runs all when empty
  bool was_met_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
  double copy_rate_ = 0;
};

}  // namespace thalweg
