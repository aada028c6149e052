// The frames waiting to be written to a stream. gRPC allows one write at a time, and ending a
// stream counts as a write: the queue hands out that turn.
#pragma once

#include <deque>

#include "core/base/mutex.h"
#include "grpcpp/support/byte_buffer.h"

namespace thalweg {

// Thread-safe. Whoever is told kWrite or kEnd must do that, outside any lock; nobody else is told
// anything but kNothing until Written() was called. So a stream is never ended during a write, and
// a frame may be pushed at any time, also after the end.
//
// Not bounded here: a node may have window_chunks chunks unanswered, so neither side ever queues
// more than that many chunks and one failure.
class WriteQueue {
 public:
  enum class Turn {
    kNothing,
    kWrite,  // start writing current()
    kEnd,    // end the stream; told once
  };
  enum class Pending { kSend, kDrop };

  // Dropped after Close.
  Turn Push(grpc::ByteBuffer frame);
  // The write of current() has ended.
  Turn Written();
  // No frame is accepted any more; those waiting are sent before the end, or dropped. May be
  // repeated.
  Turn Close(Pending pending);

  // Valid from kWrite until Written().
  const grpc::ByteBuffer& current() const { return current_; }

 private:
  Turn NextLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Mutex mutex_;
  std::deque<grpc::ByteBuffer> waiting_ ABSL_GUARDED_BY(mutex_);
  bool busy_ ABSL_GUARDED_BY(mutex_) = false;  // a turn has been handed out
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  grpc::ByteBuffer current_;  // belongs to the holder of the turn
};

}  // namespace thalweg
