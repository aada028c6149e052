#include "server/sidecar/bucket/step_queue.h"

#include <algorithm>
#include <utility>

namespace thalweg {

void StepQueue::AddFirst(Step step) {
  MutexLock lock(mutex_);
  first_.push_back({std::move(step)});
}

void StepQueue::AddLater(Step step, bool may_be_followed) {
  MutexLock lock(mutex_);
  later_.push_back({std::move(step), may_be_followed});
}

void StepQueue::NoteHere(const Part& part) {
  MutexLock lock(mutex_);
  for (std::deque<Waiting>* queue : {&first_, &later_}) {
    for (Waiting& waiting : *queue) {
      if (waiting.step.part == &part) waiting.is_here = true;
    }
  }
  changed_.NotifyAll();
}

std::optional<Step> StepQueue::Next() {
  MutexLock lock(mutex_);
  std::optional<Step> step;
  changed_.WaitUntil(mutex_, kUntilStopped, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (!outcome_.Check().ok()) return true;
    step = TakeLocked();
    return step.has_value();
  });
  is_taken_ = step.has_value();
  return step;
}

void StepQueue::NoteDone() {
  MutexLock lock(mutex_);
  is_taken_ = false;
  idle_.NotifyAll();
}

bool StepQueue::WaitUntilIdle(TimePoint deadline) {
  MutexLock lock(mutex_);
  return idle_.WaitUntil(mutex_, deadline,
                         [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !is_taken_; });
}

std::optional<Step> StepQueue::TakeLocked() {
  // Sending comes first, because other nodes wait for it.
  if (!first_.empty() && first_.front().is_here) {
    Step step = std::move(first_.front().step);
    first_.pop_front();
    return step;
  }
  bool is_next = true;  // of those that keep their order
  const auto here = std::find_if(later_.begin(), later_.end(), [&](const Waiting& waiting) {
    const bool may_go = !waiting.may_be_followed || std::exchange(is_next, false);
    return waiting.is_here && may_go;
  });
  if (here == later_.end()) return std::nullopt;
  Step step = std::move(here->step);
  later_.erase(here);
  return step;
}

void StepQueue::Wake() {
  MutexLock lock(mutex_);
  changed_.NotifyAll();
}

}  // namespace thalweg
