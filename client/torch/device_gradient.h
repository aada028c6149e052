// Torch tensors in a CUDA device's memory, as a Session with a device sees them.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Stream.h>

#include <exception>
#include <memory>

#include "client/core/session.h"

namespace thalweg {

// One device and its streams. Thread-safe. Needs nothing of torch's that is made for CUDA: the same
// module serves torch with CUDA and without.
class TorchDevice {
 public:
  // `session` must have been connected with that device.
  TorchDevice(std::shared_ptr<Session> session, c10::Device device);

  c10::Device device() const { return device_; }

  // `tensor` as the current stream will have made it. Keeps its memory, not the tensor.
  DeviceGradient GradientOf(const at::Tensor& tensor) const;

  // For futures whose value is on the device: whoever waits for them makes its streams wait for it.
  c10::intrusive_ptr<c10::ivalue::Future> MakeFuture() const;
  // Completes such a future with `tensor`, which holds the result when `arrived` is reached, or
  // with an error. Never throws.
  void Complete(c10::ivalue::Future& future, const at::Tensor& tensor, DeviceEvent arrived) const;

 private:
  const std::shared_ptr<DeviceRuntime> runtime_;
  const c10::Device device_;
  // Of torch's pool: events can be handed to a future only by way of a stream of torch's.
  const c10::Stream arrivals_;
};

// An error of the session as one for torch.
std::exception_ptr ToException(const absl::Status& status);

}  // namespace thalweg
