// DeviceGroup runs collectives among devices of one process. It is an interface to NCCL, for the
// same reason as device_runtime.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "core/base/dtype.h"
#include "core/device/device_runtime.h"

namespace thalweg {

// A DeviceGroup is thread-safe. Reduce and Broadcast queue work on the members' streams, each of
// its own device, and wait for nothing that is queued. The work begins when all members' streams
// have reached it and all earlier work of the group is done. Any device of the group may be the
// calling thread's current one, and stays so unless the call fails.
//
// A group that has met an error is unusable: every call returns that error, and queued work may
// never end until the group is aborted; then it ends with meaningless results.
class DeviceGroup {
 public:
  struct Member {
    void* memory = nullptr;
    DeviceStream stream = nullptr;
  };

  virtual ~DeviceGroup() = default;

  // Sums `elems` elements of all members into the root's memory; the other members' memory is
  // unchanged. The order of the sums depends on the group and on `elems`, not on time.
  virtual absl::Status Reduce(std::span<const Member> members, size_t root, DType dtype,
                              uint64_t elems) = 0;
  // Copies the root's `bytes` to all other members.
  virtual absl::Status Broadcast(std::span<const Member> members, size_t root, uint64_t bytes) = 0;

  // Returns OK, or the error of queued work. Does not wait.
  virtual absl::Status Check() = 0;
  // Makes `why` the group's error, unless it has one.
  virtual void Fail(const absl::Status& why) = 0;
  // Ends the queued work of a group that has met an error. Everybody who could use its results must
  // have been told before. Does not wait: the streams show when the work has ended.
  virtual void Abort() = 0;
};

}  // namespace thalweg
