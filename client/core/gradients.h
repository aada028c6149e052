// What a session's rounds take and give: gradients of buckets in a device's memory, and means.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/device/device_runtime.h"

namespace thalweg {

// A DeviceGradient is a bucket's gradient in a device's memory.
struct DeviceGradient {
  std::span<std::byte> bytes;  // the result replaces the gradient here
  // the gradient is ready when this stream has done its queued work
  DeviceStream producer = nullptr;
  // keeps the memory alive; released when nothing uses it any more
  std::shared_ptr<const void> owner;
};

// A ReducedBucket is the mean over all workers of the job, in the bucket's own type.
struct ReducedBucket {
  std::span<const std::byte> bytes;
  // Keeps `bytes` mapped. They are read-only, shared by all workers of the node, and overwritten by
  // the bucket's next round.
  std::shared_ptr<const void> owner;
  // Set for a DeviceGradient: `bytes` are the gradient's own, and hold the result for streams that
  // have been made to wait for this event during the call of `done`.
  DeviceEvent arrived = nullptr;
  // How many elements of the mean are not finite.
  uint64_t nonfinite_elems = 0;
  // Set for a served bucket whose update commits, unless pulled: see UpdateRound. No `bytes` then.
  std::vector<double> squares = {};
};

}  // namespace thalweg
