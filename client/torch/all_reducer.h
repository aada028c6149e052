// AllReducer reduces single tensors through a Session, outside of DDP.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>

#include "client/core/session.h"

namespace thalweg {

// It is thread-compatible. All workers must make the same calls in the same order.
class AllReducer {
 public:
  explicit AllReducer(std::shared_ptr<Session> session) : session_(std::move(session)) {}

  // Returns the mean over all workers of `tensor`, which must be on the CPU, in its shape. Blocks;
  // does not need Python's lock. The result is read-only memory that the node's workers share; the
  // next call with the same `bucket` overwrites it. Throws std::runtime_error.
  at::Tensor Mean(const at::Tensor& tensor, uint32_t bucket);

 private:
  struct Announced {
    BucketId id;
    BucketLayout layout;
  };

  BucketId Announce(uint32_t bucket, const BucketLayout& layout);

  const std::shared_ptr<Session> session_;
  std::map<uint32_t, Announced> announced_;
};

}  // namespace thalweg
