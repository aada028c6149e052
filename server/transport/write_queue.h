// The frames waiting to be written to a stream. gRPC allows one write at a time, and ending a
// stream counts as a write: the queue hands out that turn.
#pragma once

#include <cstddef>
#include <deque>

#include "core/base/clock.h"
#include "core/base/mutex.h"
#include "grpcpp/support/byte_buffer.h"
#include "server/transport/stream_counters.h"

namespace thalweg {

// Thread-safe. Whoever is told kWrite or kEnd must do that, outside any lock; nobody else is told
// anything but kNothing until Written() was called. So a stream is never ended during a write, and
// a frame may be pushed at any time, also after the end.
//
// Not bounded here: a node sends no more than window_chunks chunks without an answer, and the shard
// counts Waiting() against the node's window before it takes another contribution.
class WriteQueue {
 public:
  enum class Turn {
    kNothing,
    kWrite,  // start writing current()
    kEnd,    // end the stream; told once
  };

  // Whether the first turn is free, or is given back by the first Written().
  enum class Start { kFree, kBusy };
  explicit WriteQueue(const StreamCounters& counters, Start start = Start::kFree)
      : counters_(counters), busy_(start == Start::kBusy) {}
  ~WriteQueue();

  // Dropped after the end was ordered.
  Turn Push(grpc::ByteBuffer&& frame);
  // Orders the end after `frame`. What is waiting is dropped: who ends a stream so has no use for
  // it, and a peer that does not read shall not make us keep it.
  Turn PushLast(grpc::ByteBuffer&& frame);
  // Orders the end and drops what is waiting, but for the frame of an earlier PushLast.
  Turn Close();
  // The write of current() has ended.
  Turn Written();

  // Frames that nobody was told to write yet.
  size_t Waiting() const;

  // Valid from kWrite until Written().
  const grpc::ByteBuffer& current() const { return current_.bytes; }

 private:
  struct Frame {
    grpc::ByteBuffer bytes;
    TimePoint queued;
  };
  using Frames = std::deque<Frame>;

  void AddLocked(grpc::ByteBuffer&& frame) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CountDropped(const Frames& dropped) const;
  Turn NextLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const StreamCounters counters_;

  mutable Mutex mutex_;
  Frames waiting_ ABSL_GUARDED_BY(mutex_);
  bool busy_ ABSL_GUARDED_BY(mutex_);  // a turn has been handed out
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  Frame current_;  // empty, or being written; belongs to the holder of the turn
};

}  // namespace thalweg
