#include "server/transport/write_queue.h"

#include <utility>

namespace thalweg {

// Frames are swapped throughout, because moving a grpc::ByteBuffer copies it. Dropped frames are
// declared before the lock, so that their payloads are freed outside it.

WriteQueue::~WriteQueue() {
  Frames dropped;
  {
    MutexLock lock(mutex_);
    dropped.swap(waiting_);
  }
  if (current_.bytes.Valid()) dropped.emplace_back().bytes.Swap(&current_.bytes);
  CountDropped(dropped);
}

WriteQueue::Turn WriteQueue::Push(grpc::ByteBuffer&& frame, bool is_answer) {
  MutexLock lock(mutex_);
  if (closed_) return Turn::kNothing;
  AddLocked(std::move(frame), is_answer);
  return NextLocked();
}

WriteQueue::Turn WriteQueue::PushLast(grpc::ByteBuffer&& frame) {
  Frames dropped;
  MutexLock lock(mutex_);
  if (closed_) return Turn::kNothing;
  closed_ = true;
  dropped.swap(waiting_);
  waiting_answers_ = 0;
  CountDropped(dropped);
  AddLocked(std::move(frame), /*is_answer=*/false);
  return NextLocked();
}

WriteQueue::Turn WriteQueue::Close() {
  Frames dropped;
  MutexLock lock(mutex_);
  if (!closed_) {
    dropped.swap(waiting_);
    waiting_answers_ = 0;
  }
  CountDropped(dropped);
  closed_ = true;
  return NextLocked();
}

WriteQueue::Turn WriteQueue::Written() {
  grpc::ByteBuffer written;
  written.Swap(&current_.bytes);
  if (written.Valid()) {  // invalid when the turn was Start::kBusy's
    counters_.send_seconds.Observe(ToSeconds(Now() - current_.queued));
    counters_.queued_bytes.Add(-static_cast<double>(written.Length()));
  }
  MutexLock lock(mutex_);
  busy_ = false;
  return NextLocked();
}

void WriteQueue::AddLocked(grpc::ByteBuffer&& frame, bool is_answer) {
  Frame& added = waiting_.emplace_back();
  added.bytes.Swap(&frame);
  added.queued = Now();
  added.is_answer = is_answer;
  if (is_answer) ++waiting_answers_;
  counters_.queued_bytes.Add(static_cast<double>(added.bytes.Length()));
}

void WriteQueue::CountDropped(const Frames& dropped) const {
  for (const Frame& frame : dropped) {
    counters_.queued_bytes.Add(-static_cast<double>(frame.bytes.Length()));
  }
}

size_t WriteQueue::WaitingAnswers() const {
  MutexLock lock(mutex_);
  return waiting_answers_;
}

TimePoint WriteQueue::BusySince() const {
  MutexLock lock(mutex_);
  return busy_ ? busy_since_ : TimePoint::max();
}

WriteQueue::Turn WriteQueue::NextLocked() {
  if (busy_) return Turn::kNothing;
  busy_since_ = Now();
  if (waiting_.empty()) {
    // The turn to end the stream is never returned, so this line runs at most once after the end.
    busy_ = closed_;
    return closed_ ? Turn::kEnd : Turn::kNothing;
  }
  busy_ = true;
  current_.bytes.Swap(&waiting_.front().bytes);
  current_.queued = waiting_.front().queued;
  if (waiting_.front().is_answer) --waiting_answers_;
  waiting_.pop_front();
  return Turn::kWrite;
}

}  // namespace thalweg
