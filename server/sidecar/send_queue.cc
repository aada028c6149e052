#include "server/sidecar/send_queue.h"

#include <utility>

namespace thalweg {

bool SendQueue::Push(Contribution contribution) {
  waiting_.push_back(std::move(contribution));
  return BeginSending();
}

bool SendQueue::NoteAnswered() {
  if (owed_ > 0) --owed_;
  return BeginSending();
}

bool SendQueue::BeginSending() { return !std::exchange(is_sending_, true); }

std::optional<Contribution> SendQueue::Next(uint32_t window, TimePoint now) {
  if (waiting_.empty() || owed_ >= window) {
    if (!waiting_.empty() && !full_since_) full_since_ = now;
    is_sending_ = false;
    return std::nullopt;
  }
  if (full_since_) wait_seconds_.Add(ToSeconds(now - *full_since_));
  full_since_.reset();
  ++owed_;
  std::optional<Contribution> next = std::move(waiting_.front());
  waiting_.pop_front();
  return next;
}

std::deque<Contribution> SendQueue::Close() {
  full_since_.reset();
  return std::exchange(waiting_, {});
}

}  // namespace thalweg
