#include "client/core/completions.h"

#include <cstddef>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"

namespace thalweg {
namespace {

struct Place {
  const Completions* owner = nullptr;
  int lane = 0;
  int callbacks = 0;  // that InCallback tells of
};
thread_local Place here;

}  // namespace

Completions::InCallback::InCallback() { ++here.callbacks; }
Completions::InCallback::~InCallback() { --here.callbacks; }

int Completions::LaneHere() const {
  return here.callbacks + (here.owner == this ? here.lane + 1 : 0);
}

std::deque<Completions::Call>& Completions::CallsOf(size_t lane) {
  while (lanes_.size() <= lane) {
    const size_t number = lanes_.size();
    lanes_.push_back(std::make_unique<Lane>());
    lanes_.back()->thread =
        Thread(absl::StrCat("thw-complete-", number), [this, number] { Run(number); });
  }
  return lanes_[lane]->calls;
}

void Completions::Add(int lane, Call call) {
  {
    MutexLock lock(mutex_);
    if (!is_closed_) {
      CallsOf(overtakes_ ? lanes_.size() - 1 : static_cast<size_t>(lane))
          .push_back(std::move(call));
      changed_.NotifyAll();
      return;
    }
  }
  call();
}

void Completions::Overtake() {
  MutexLock lock(mutex_);
  if (is_closed_ || overtakes_) return;
  std::deque<Call>& last = CallsOf(lanes_.size());
  for (const auto& lane : lanes_) {
    if (&lane->calls == &last) break;
    last.insert(last.end(), std::make_move_iterator(lane->calls.begin()),
                std::make_move_iterator(lane->calls.end()));
    lane->calls.clear();
  }
  overtakes_ = true;
  changed_.NotifyAll();
}

void Completions::Run(size_t lane) {
  here = {this, static_cast<int>(lane), 0};
  while (true) {
    Call next;
    {
      MutexLock lock(mutex_);
      std::deque<Call>& calls = lanes_[lane]->calls;
      changed_.WaitUntil(mutex_, kUntilStopped, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return !calls.empty() || is_closed_;
      });
      if (calls.empty()) return;
      next = std::move(calls.front());
      calls.pop_front();
    }
    std::move(next)();
  }
}

void Completions::Close() {
  std::vector<Thread*> threads;
  {
    MutexLock lock(mutex_);
    is_closed_ = true;
    changed_.NotifyAll();
    for (const auto& lane : lanes_) threads.push_back(&lane->thread);
  }
  for (Thread* thread : threads) thread->Join();
}

void Completions::DetachInChild() {
  for (const auto& lane : lanes_) lane->thread.Detach();
}

}  // namespace thalweg
