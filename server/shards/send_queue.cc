#include "server/shards/send_queue.h"

#include <utility>

namespace thalweg {

bool SendQueue::Push(Contribution contribution, double place) {
  places_.push_back(place);
  waiting_.push_back(std::move(contribution));
  return BeginSending();
}

bool SendQueue::NoteAnswered() {
  if (owed() > 0) places_.pop_front();
  return BeginSending();
}

bool SendQueue::BeginSending() { return !std::exchange(is_sending_, true); }

std::optional<Contribution> SendQueue::Next(uint32_t window, TimePoint now) {
  if (waiting_.empty() || owed() >= window) {
    if (!waiting_.empty() && !full_since_) full_since_ = now;
    is_sending_ = false;
    return std::nullopt;
  }
  if (full_since_) wait_seconds_.Add(ToSeconds(now - *full_since_));
  full_since_.reset();
  std::optional<Contribution> next = std::move(waiting_.front());
  waiting_.pop_front();
  return next;
}

std::optional<double> SendQueue::oldest() const {
  return places_.empty() ? std::nullopt : std::optional(places_.front());
}

std::optional<double> SendQueue::next() const {
  return waiting_.empty() ? std::nullopt : std::optional(places_[owed()]);
}

std::deque<Contribution> SendQueue::Close() {
  full_since_.reset();
  places_.resize(owed());
  return std::exchange(waiting_, {});
}

}  // namespace thalweg
