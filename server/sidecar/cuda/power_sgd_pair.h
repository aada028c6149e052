// For tests: PowerSGD on a node with GPUs beside one without, which get the same means.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "server/sidecar/cuda/node_rounds.h"

namespace thalweg {

// The codecs use these states; both outlive the codecs.
struct PairStates {
  ParameterStates gpu;
  ParameterStates cpu;
};

// A PowerSgdPair runs a node with a GPU and one without beside each other and compares every step.
// The payloads of the one without are the mean that both receive.
class PowerSgdPair {
 public:
  // May change what both get of a part; its values are in wire type.
  using Tamper = std::function<void(const Part& part, std::vector<std::byte>& mean)>;

  PowerSgdPair(FakeGpus& gpus, CudaDevice& device, const BucketLayout& layout,
               const std::vector<uint32_t>& members, const CodecSpec& spec, uint32_t workers,
               PairStates& states);

  GpuNode& gpu() { return gpu_; }
  BucketCodec& gpu_codec() { return *gpu_codec_; }
  BucketCodec& cpu_codec() { return *cpu_codec_; }

  void Round(const std::vector<Floats>& gradients, const Tamper& tamper = nullptr);

  // Saves the states of both and compares them.
  void ExpectSameStates();

 private:
  void Exchange(Part& cpu_part, Part& gpu_part, Gradient& cpu_gradient, Gradient& gpu_gradient,
                const Tamper& tamper);
  // All bits, but for P in the first part.
  void ExpectSameSent(const Part& part, const std::vector<std::byte>& cpu,
                      const std::vector<std::byte>& gpu);
  // Compares what both send of a P.
  void ExpectNear(const TensorSpec& tensor, const Floats& cpu, const Floats& gpu);
  void ExpectSameResults();

  const TensorSet set_;
  const CodecSpec spec_;
  PairStates& states_;
  GpuNode gpu_;
  CpuNode cpu_;
  std::unique_ptr<BucketCodec> gpu_codec_;
  std::unique_ptr<BucketCodec> cpu_codec_;
};

}  // namespace thalweg
