// PyTorch's DistributedDataParallel on top of a Session: the communication hook that its reducer
// calls once per gradient bucket and backward pass.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <unordered_map>
#include <vector>

#include "client/core/session.h"
#include "client/torch/device_gradient.h"
#include "core/base/layout.h"

namespace thalweg {

// Returns futures that hold the mean over all workers. On the CPU it is in memory that is shared by
// the node and read-only: the reducer copies it into the gradients (with gradient_as_bucket_view as
// well), so that nothing needs to be copied here. On a device it is in the bucket itself, and the
// future makes the streams of whoever waits for it wait for it, too. Errors reach the user as
// RuntimeError from backward(), beginning with "thalweg: ".
//
// Threads: one hook runs at a time, in bucket order, without holding Python's lock. Futures
// complete on the session's completion thread; completing them takes Python's lock only where
// somebody has added a callback in Python, so whoever ends the session must not hold it.
class DdpHook : public c10d::CommHookInterface {
 public:
  // The module whose gradients these are keeps the parameters alive, so that their addresses
  // identify them.
  using ParameterNames = std::unordered_map<const c10::TensorImpl*, std::string>;

  // Shared: the Python object that shows statistics and closes the session lives apart from the
  // reducer. `device` is where the gradients are, the session's if it has one.
  DdpHook(std::shared_ptr<Session> session, ParameterNames names, c10::Device device);

  // Throws std::runtime_error for buckets that cannot be reduced: sparse, not on the device, of
  // another element type than fp32, fp16, bf16 and fp64, or with parameters that had no name.
  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override;
  at::Tensor parseHookResult(const c10::IValue& result) override;

 private:
  // What was last announced for a bucket index. DDP cuts its buckets anew after the first
  // iteration.
  struct Announced {
    BucketId id;
    DType dtype = DType::kFloat32;
    uint64_t elems = 0;
    std::vector<const c10::TensorImpl*> parameters;
  };

  // Announces the bucket if its parameters, size or type are not those announced before.
  BucketId Announce(const c10d::GradBucket& bucket, DType dtype);
  c10::intrusive_ptr<c10::ivalue::Future> SubmitFromDevice(BucketId id, const at::Tensor& buffer);
  BucketLayout LayoutOf(const std::vector<at::Tensor>& parameters, DType dtype) const;

  const std::shared_ptr<Session> session_;
  const ParameterNames names_;
  const c10::Device device_;
  // Shared with what is in flight; null for the CPU.
  const std::shared_ptr<const TorchDevice> torch_device_;
  std::unordered_map<size_t, Announced> announced_;
};

}  // namespace thalweg
