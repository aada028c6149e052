#include "server/transport/write_queue.h"

namespace thalweg {

WriteQueue::Turn WriteQueue::Push(grpc::ByteBuffer frame) {
  MutexLock lock(mutex_);
  if (closed_) return Turn::kNothing;
  // Swapped, here and below: grpc::ByteBuffer copies when it is moved.
  waiting_.emplace_back().Swap(&frame);
  return NextLocked();
}

WriteQueue::Turn WriteQueue::Written() {
  // Released outside the lock: it may free a payload.
  grpc::ByteBuffer written;
  written.Swap(&current_);
  MutexLock lock(mutex_);
  busy_ = false;
  return NextLocked();
}

WriteQueue::Turn WriteQueue::Close(Pending pending) {
  std::deque<grpc::ByteBuffer> dropped;
  MutexLock lock(mutex_);
  closed_ = true;
  if (pending == Pending::kDrop) dropped.swap(waiting_);
  return NextLocked();
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
