// Where a node's gradients lie and are worked on. The sidecar does not know which kind it has.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "core/base/dtype.h"
#include "core/base/payload.h"

namespace thalweg {

// Thread-safe.
class Device {
 public:
  virtual ~Device() = default;

  // Folds the shares of the node's workers, in local rank order, into their mean and encodes it:
  // `elems` elements of type `share` each, into `out` in `wire` type. Returns how many of the
  // results are NaN or infinite.
  virtual uint64_t Encode(std::span<const void* const> shares, DType share, DType wire,
                          size_t elems, void* out) = 0;

  // Decodes a result of `elems` elements into `out` in `bucket` type. InvalidArgument when its size
  // is wrong.
  virtual absl::Status Decode(const Payload& result, DType wire, DType bucket, size_t elems,
                              void* out) = 0;
};

}  // namespace thalweg
