// The parameters of one group of a torch optimizer on a GPU, updated by the kernels of
// kernels/optim/optim_cuda.h: without waiting for the GPU, with the bits of FusedTensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "client/torch/tensor_group.h"
#include "kernels/optim/optim_cuda.h"

namespace thalweg {

// What a step reads on the device when it runs: one number each, of any type and place (those that
// are not float32 on the device are copied).
struct DeviceInputs {
  std::optional<at::Tensor> lr;          // instead of the settings'
  std::optional<at::Tensor> grad_scale;  // gradients are divided by it
  std::optional<at::Tensor> found_inf;   // unless 0, nothing changes and no step is counted
  // A float64 as of GradSquares(), of all gradients that are clipped together; wanted where
  // settings have max_grad_norm.
  std::optional<at::Tensor> grad_squares;
};

// Thread-compatible; work is put into torch's current stream. Methods need not hold Python's lock,
// and throw and return what those of FusedTensors do.
class FusedDeviceTensors {
 public:
  // Throws NotFusable unless the steps of `group` are float32 on its device. SGD needs steps only
  // with momentum.
  explicit FusedDeviceTensors(TensorGroup group);

  void CheckGrads() const { group_.CheckGrads(); }
  // See TensorGroup.
  void UseGradsOfCopies(std::optional<int32_t> exponent) { group_.UseGradsOfCopies(exponent); }

  size_t Adam(const AdamSettings& settings, const DeviceInputs& inputs);
  size_t Sgd(const SgdSettings& settings, const DeviceInputs& inputs);
  size_t Lamb(const LambSettings& settings, const DeviceInputs& inputs);

  // One float64 on the device.
  at::Tensor GradSquares();

 private:
  // Bytes that kernels read on the device, copied there when they are others than before.
  class Sent {
   public:
    const std::byte* Send(std::span<const std::byte> bytes, at::Device device);

   private:
    std::vector<std::byte> bytes_;
    at::Tensor memory_;
  };

  // The parameters that have gradients, as the kernels see them.
  struct Batch {
    TensorGroup::Work work;
    OptimPlan plan;
    OptimMemory memory;
  };
  Batch Prepare();

  template <class Settings>
  using Step = absl::Status (*)(CudaStream, const OptimPlan&, const OptimMemory&, const Settings*,
                                const StepInputs&);
  template <class Settings>
  size_t Run(Step<Settings> step, Settings settings, const DeviceInputs& inputs);

  TensorGroup group_;
  Sent table_;
  Sent settings_;
  at::Tensor workspace_;
};

}  // namespace thalweg
