// Collectives among devices of one process. NCCL behind an interface, for the same reason as
// device_runtime.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "core/base/dtype.h"
#include "core/device/device_runtime.h"

namespace thalweg {

// Thread-safe. Reduce and Broadcast queue on the members' streams, each of its own device, and wait
// for nothing that is queued. What is queued begins when all members' streams have got there and
// all that the group was given before is done. Any device of the group may be the calling thread's
// current one, and stays so unless the call fails.
//
// A group that has met an error is of no use any more: every call returns that error, and what is
// queued may never end, until it is aborted: then it ends, with results that mean nothing.
class DeviceGroup {
 public:
  struct Member {
    void* memory = nullptr;
    DeviceStream stream = nullptr;
  };

  virtual ~DeviceGroup() = default;

  // Sums `elems` elements of all members into the root's memory; those of the others keep their
  // values. The order of the sums depends on the group and on `elems`, not on time.
  virtual absl::Status Reduce(std::span<const Member> members, size_t root, DType dtype,
                              uint64_t elems) = 0;
  // Copies the root's `bytes` to all other members.
  virtual absl::Status Broadcast(std::span<const Member> members, size_t root, uint64_t bytes) = 0;

  // OK, or what has gone wrong in what was queued. Does not wait.
  virtual absl::Status Check() = 0;
  // Makes `why` the group's error, unless it has one.
  virtual void Fail(const absl::Status& why) = 0;
  // Of a group that has met an error: has what is queued end. Whoever could take its results for
  // something must have been told before. Does not wait: the end is to be seen on the streams.
  virtual void Abort() = 0;
};

}  // namespace thalweg
