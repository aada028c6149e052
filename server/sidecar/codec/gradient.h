// A bucket's gradient as the workers of a node have handed it over.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "core/base/dtype.h"

namespace thalweg {

// Thread-safe where one thread reads an element at a time.
class Gradient {
 public:
  explicit Gradient(DType share) : share_(share) {}
  virtual ~Gradient() = default;

  // Waits until all workers have put the elements up to `end` there.
  virtual absl::Status WaitFor(uint64_t end) = 0;
  // The workers' shares from element `begin` on, by local rank, of type share(): addresses on the
  // device of the codec that asks.
  virtual std::vector<const void*> Shares(uint64_t begin) const = 0;
  DType share() const { return share_; }

  // Returns the mean over the workers of elements [begin, begin + elems), in float32: a view of the
  // only worker's share, or else a view of `tile`. The shares must be in host memory.
  const float* Read(uint64_t begin, uint64_t elems, std::vector<float>& tile) const;

 private:
  const DType share_;
};

// Puts the mean of the shares, in host memory, in that order, into `out`: `elems` elements of type
// `share` each, in `wire` type. Returns how many of the results are NaN or infinite. Thread-safe.
uint64_t FoldShares(const std::vector<const void*>& shares, DType share, DType wire, uint64_t elems,
                    void* out);

}  // namespace thalweg
