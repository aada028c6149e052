// What a SidecarSession keeps of each of its buckets.
#pragma once

#include <cstdint>
#include <memory>

#include "client/core/device_path.h"
#include "client/core/session.h"
#include "core/base/clock.h"
#include "core/base/layout.h"
#include "core/ipc/bucket_arena.h"
#include "core/ipc/message.h"

namespace thalweg {

// A SessionCallback is told what becomes of a round. Foreign code runs on the completion thread;
// our own callbacks, which only wake a waiter, may run on the progress thread.
struct SessionCallback {
  enum class On { kCompletionThread, kProgressThread };
  Session::Done done;
  On thread = On::kCompletionThread;
  int lane = 0;  // of the session's Completions
};

// A SessionBucket is one bucket as its worker sees it, and the round that is in flight.
struct SessionBucket {
  BucketLayout layout;
  bool has_update = false;
  uint64_t elems = 0;
  ChunkPlan plan;
  DType dtype = DType::kFloat32;
  DType share = DType::kFloat32;       // element type in `input`
  std::shared_ptr<BucketArena> input;  // shared with copies in flight
  // The results handed out share ownership; they may outlive the bucket's layout.
  std::shared_ptr<const BucketArena> result;
  uint64_t round = 0;
  uint64_t loaded_at = 0;    // the last round before a codec's state was loaded
  SessionCallback callback;  // set while a round is in flight
  // These six are for the sidecar's next process.
  bool is_announced = false;  // to the process of the moment
  ipc::Placed placed;
  ipc::CodecMemory codec_memory;
  std::shared_ptr<const UniqueFd> codec_memory_fd;  // null: none has come
  uint64_t nonfinite_elems = 0;                     // of the last result
  ipc::Submit submit;                               // of the round in flight
  // These three exist only in a session with a device: its view of the arenas, that of the last
  // layout until the sidecar answers, and what is in flight.
  std::shared_ptr<DevicePath::Lane> lane;
  std::shared_ptr<DevicePath::Lane> old_lane;
  DeviceGradient gradient;
  TimePoint submitted;
  TimePoint filled;          // when traced: the gradient is in the arena, or its copy is queued
  uint32_t chunks_seen = 0;  // finished by the sidecar, at the last check
};

// A SessionLanding is a result that still has to go to a device's memory, if any.
struct SessionLanding {
  std::shared_ptr<DevicePath::Lane> lane;
  std::shared_ptr<const BucketArena> result;
  DeviceGradient gradient;
};

}  // namespace thalweg
