// This header adapts torch tensors in a CUDA device's memory to a Session with a device.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Stream.h>

#include <exception>
#include <memory>

#include "client/core/session.h"

namespace thalweg {

// A TorchDevice is one device and its streams. It is thread-safe. It uses none of torch's
// CUDA-specific interfaces: the same module works with torch builds with and without CUDA.
class TorchDevice {
 public:
  // `session` must have been connected with that device.
  TorchDevice(std::shared_ptr<Session> session, c10::Device device);

  c10::Device device() const { return device_; }

  // Returns `tensor` as the current stream will have made it. Keeps its memory alive, not the
  // tensor.
  DeviceGradient GradientOf(const at::Tensor& tensor) const;

  // Makes a future whose value is on the device: its waiters' streams wait for the value.
  c10::intrusive_ptr<c10::ivalue::Future> MakeFuture() const;
  // Completes such a future with `tensor`, which holds the result when `arrived` is reached, or
  // with an error. Never throws.
  void Complete(c10::ivalue::Future& future, const at::Tensor& tensor, DeviceEvent arrived) const;

 private:
  const std::shared_ptr<DeviceRuntime> runtime_;
  const c10::Device device_;
  // This stream comes from torch's pool: a future takes events only from a stream of torch's.
  const c10::Stream arrivals_;
};

// Converts an error of the session to an exception for torch.
std::exception_ptr ToException(const absl::Status& status);

}  // namespace thalweg
