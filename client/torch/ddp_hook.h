// DdpHook connects PyTorch's DistributedDataParallel to a Session: it is the communication hook
// that DDP's reducer calls once per gradient bucket and backward pass.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>
#include <unordered_map>
#include <vector>

#include "client/core/session.h"
#include "client/torch/device_gradient.h"
#include "core/base/layout.h"

namespace thalweg {

// The hook returns futures that hold the mean over all workers. On the CPU it is in memory that is
// shared by the node and read-only: the reducer copies it into the gradients (also with
// gradient_as_bucket_view), so the hook copies nothing. On a device it is in the bucket itself, and
// the future makes its waiters' streams wait for it. Errors reach the user as RuntimeError from
// backward(), beginning with "thalweg: ".
//
// Threads: one hook runs at a time, in bucket order, without holding Python's lock. Futures
// complete on the session's completion thread; completing them takes Python's lock only where a
// callback has been added in Python, so a thread that closes the session must not hold it.
class DdpHook : public c10d::CommHookInterface {
 public:
  // The module that owns these gradients keeps the parameters alive, so that their addresses
  // identify them.
  struct Parameter {
    std::string name;
    size_t number = 0;  // among ParametersOf the reducer
    uint64_t elems = 0;
  };
  using Parameters = std::unordered_map<const c10::TensorImpl*, Parameter>;

  // The session is shared: the Python object that shows statistics and closes the session has
  // another lifetime than the reducer. `device` holds the gradients; it is the session's device if
  // it has one. `reducer` owns the hook; null: its caller has scaled the gradients (ScaleToJoined),
  // which are of several workers, and all parameters count as used.
  DdpHook(std::shared_ptr<Session> session, Parameters parameters, c10::Device device,
          const c10d::Reducer* reducer);

  // Throws std::runtime_error for buckets that cannot be reduced: sparse, not on the device, of
  // another element type than fp32, fp16, bf16 and fp64, or with parameters that have no name.
  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override;
  at::Tensor parseHookResult(const c10::IValue& result) override;

 private:
  // An Announced is the last announcement of a bucket index. DDP rebuilds its buckets after the
  // first iteration.
  struct Announced {
    BucketId id;
    DType dtype = DType::kFloat32;
    uint64_t elems = 0;
    std::vector<const c10::TensorImpl*> parameters;
  };

  // Returns a number that no other bucket of this backward pass has, the same on all workers. It is
  // DDP's, but for the first pass of a static graph, where DDP calls all buckets 0.
  size_t NumberOf(const c10d::GradBucket& bucket);
  // Announces the bucket if its parameters, size or type differ from the last announcement.
  BucketId Announce(const c10d::GradBucket& bucket, DType dtype);
  c10::intrusive_ptr<c10::ivalue::Future> SubmitFromDevice(BucketId id, const at::Tensor& buffer,
                                                           Session::Notes notes);
  const Parameter& Find(const at::Tensor& parameter) const;
  BucketLayout LayoutOf(const std::vector<at::Tensor>& parameters, DType dtype) const;
  // Returns which of the bucket's tensors took no part in this backward pass.
  std::vector<uint32_t> UnusedOf(const c10d::GradBucket& bucket) const;

  const std::shared_ptr<Session> session_;
  const Parameters parameters_;
  const c10::Device device_;
  const c10d::Reducer* const reducer_;
  // The rounds in flight share ownership; null for the CPU.
  const std::shared_ptr<const TorchDevice> torch_device_;
  std::unordered_map<size_t, Announced> announced_;
  const uint64_t elems_per_pass_;  // of all parameters, each of which is in one bucket of a pass
  uint64_t elems_in_pass_ = 0;     // of the buckets of this pass so far
  std::set<size_t> numbers_in_pass_;
};

}  // namespace thalweg
