// A bucket's gradient as the arenas of a node's workers hold it.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "core/base/dtype.h"
#include "server/sidecar/device/device.h"

namespace thalweg {

// Thread-safe where one thread reads an element at a time.
class Gradient {
 public:
  Gradient(Device& device, DType share) : device_(device), share_(share) {}
  virtual ~Gradient() = default;

  // Waits until all workers have put the elements up to `end` there.
  virtual absl::Status WaitFor(uint64_t end) = 0;
  // The workers' shares from element `begin` on, by local rank, of type share().
  virtual std::vector<const void*> Shares(uint64_t begin) const = 0;
  DType share() const { return share_; }

  // The mean over the workers of elements [begin, begin + elems), in float32: a view of the only
  // worker's arena, or else put into `tile`.
  const float* Read(uint64_t begin, uint64_t elems, std::vector<float>& tile) const;

 private:
  Device& device_;
  const DType share_;
};

}  // namespace thalweg
