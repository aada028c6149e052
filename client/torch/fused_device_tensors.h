// FusedDeviceTensors updates the parameters of one group of a torch optimizer on a GPU with the
// kernels of kernels/optim/optim_cuda.h: without waiting for the GPU, and with the same bits as
// FusedTensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "client/torch/tensor_group.h"
#include "kernels/optim/optim_cuda.h"

namespace thalweg {

// DeviceInputs are what a step reads on the device when it runs: one number each, of any type and
// place (those that are not float32 on the device are copied).
struct DeviceInputs {
  std::optional<at::Tensor> lr;          // replaces the settings'
  std::optional<at::Tensor> grad_scale;  // gradients are divided by it
  std::optional<at::Tensor> found_inf;   // if nonzero, nothing changes and no step is counted
  // A float64 as GradSquares() returns it, of all gradients that are clipped together; required
  // where settings have max_grad_norm.
  std::optional<at::Tensor> grad_squares;
};

// It is thread-compatible and queues its work on torch's current stream. Methods do not need
// Python's lock; they throw and return what those of FusedTensors do.
class FusedDeviceTensors {
 public:
  // Throws NotFusable unless the steps of `group` are float32 on its device. SGD needs steps only
  // with momentum.
  explicit FusedDeviceTensors(TensorGroup group);

  void CheckGrads() const { group_.CheckGrads(); }

  size_t Adam(const AdamSettings& settings, const DeviceInputs& inputs);
  size_t Sgd(const SgdSettings& settings, const DeviceInputs& inputs);
  size_t Lamb(const LambSettings& settings, const DeviceInputs& inputs);

  // Returns one float64 on the device.
  at::Tensor GradSquares();

 private:
  // A Sent holds bytes that kernels read on the device; they are copied there when they have
  // changed.
  class Sent {
   public:
    const std::byte* Send(std::span<const std::byte> bytes, at::Device device);

   private:
    std::vector<std::byte> bytes_;
    at::Tensor memory_;
  };

  // A Batch is the parameters that have gradients, as the kernels see them.
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

  const TensorGroup group_;
  Sent table_;
  Sent settings_;
  at::Tensor workspace_;
};

}  // namespace thalweg
