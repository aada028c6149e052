#include "server/transport/write_queue.h"

namespace thalweg {

// Frames are swapped throughout: grpc::ByteBuffer copies when it is moved. Those that are let go
// are declared before the lock, so that they free their payloads outside of it.

WriteQueue::Turn WriteQueue::Push(grpc::ByteBuffer&& frame) {
  MutexLock lock(mutex_);
  if (closed_) return Turn::kNothing;
  waiting_.emplace_back().Swap(&frame);
  return NextLocked();
}

WriteQueue::Turn WriteQueue::PushLast(grpc::ByteBuffer&& frame) {
  Frames dropped;
  MutexLock lock(mutex_);
  if (closed_) return Turn::kNothing;
  closed_ = true;
  dropped.swap(waiting_);
  waiting_.emplace_back().Swap(&frame);
  return NextLocked();
}

WriteQueue::Turn WriteQueue::Close() {
  Frames dropped;
  MutexLock lock(mutex_);
  if (!closed_) dropped.swap(waiting_);
  closed_ = true;
  return NextLocked();
}

WriteQueue::Turn WriteQueue::Written() {
  grpc::ByteBuffer written;
  written.Swap(&current_);
  MutexLock lock(mutex_);
  busy_ = false;
  return NextLocked();
}

size_t WriteQueue::Waiting() const {
  MutexLock lock(mutex_);
  return waiting_.size();
}

WriteQueue::Turn WriteQueue::NextLocked() {
  if (busy_) return Turn::kNothing;
  if (waiting_.empty()) {
    // The turn to end is never given back, so this is reached once.
    busy_ = closed_;
    return closed_ ? Turn::kEnd : Turn::kNothing;
  }
  busy_ = true;
  current_.Swap(&waiting_.front());
  waiting_.pop_front();
  return Turn::kWrite;
}

}  // namespace thalweg
