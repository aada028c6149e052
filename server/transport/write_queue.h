// WriteQueue holds the frames that wait to be written to a stream. gRPC allows one write at a time,
// and ending a stream counts as a write; the queue hands out that turn.
#pragma once

#include <cstddef>
#include <deque>

#include "core/base/clock.h"
#include "core/base/mutex.h"
#include "grpcpp/support/byte_buffer.h"
#include "server/transport/stream_counters.h"

namespace thalweg {

// A WriteQueue is thread-safe. A caller that gets kWrite or kEnd must act on it, outside any lock;
// all other calls return kNothing until Written() has been called. A stream is therefore never
// ended during a write, and a frame may be pushed at any time, also after the end.
//
// The queue itself has no bound: a node sends no more than window_chunks chunks without an answer,
// and the shard compares WaitingAnswers() with the node's window before it takes another
// contribution.
class WriteQueue {
 public:
  enum class Turn {
    kNothing,
    kWrite,  // start writing current()
    kEnd,    // end the stream; returned once
  };

  // Start says whether the first turn is free or taken; the first Written() returns a taken one.
  enum class Start { kFree, kBusy };
  explicit WriteQueue(const StreamCounters& counters, Start start = Start::kFree)
      : counters_(counters), busy_(start == Start::kBusy) {}
  ~WriteQueue();

  // Queues the frame; drops it once the end has been ordered. `is_answer`: it counts in
  // WaitingAnswers.
  Turn Push(grpc::ByteBuffer&& frame, bool is_answer = false);
  // Orders the end after `frame` and drops what is queued: a caller that ends a stream this way has
  // no use for it, and a peer that does not read must not make us keep it.
  Turn PushLast(grpc::ByteBuffer&& frame);
  // Orders the end and drops what is queued, except the frame of an earlier PushLast.
  Turn Close();
  // Reports that the write of current() has ended.
  Turn Written();

  // Returns the number of answers that nobody was told to write yet.
  size_t WaitingAnswers() const;

  // Returns when the turn was handed out that has not ended; TimePoint::max() if there is none.
  TimePoint BusySince() const;

  // Returns the frame to write; valid from kWrite until Written().
  const grpc::ByteBuffer& current() const { return current_.bytes; }

 private:
  struct Frame {
    grpc::ByteBuffer bytes;
    TimePoint queued;
    bool is_answer = false;
  };
  using Frames = std::deque<Frame>;

  void AddLocked(grpc::ByteBuffer&& frame, bool is_answer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CountDropped(const Frames& dropped) const;
  Turn NextLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const StreamCounters counters_;

  mutable Mutex mutex_;
  Frames waiting_ ABSL_GUARDED_BY(mutex_);
  size_t waiting_answers_ ABSL_GUARDED_BY(mutex_) = 0;  // among those
  bool busy_ ABSL_GUARDED_BY(mutex_);                   // a turn has been handed out
  TimePoint busy_since_ ABSL_GUARDED_BY(mutex_) = Now();
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  Frame current_;  // empty or being written; the holder of the turn owns it
};

}  // namespace thalweg
