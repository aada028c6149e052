#include "client/core/completions.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"

namespace thalweg {
namespace {

struct Place {
  const Completions* owner = nullptr;  // whose lane this thread is; null: of none
  int lane = 0;
  size_t thread = 0;
  int callbacks = 0;       // that InCallback tells of
  bool is_hidden = false;  // what it begins
};
thread_local Place here;

}  // namespace

Completions::InCallback::InCallback() { ++here.callbacks; }
Completions::InCallback::~InCallback() { --here.callbacks; }
Completions::Hidden::Hidden() { here.is_hidden = true; }
Completions::Hidden::~Hidden() { here.is_hidden = false; }

int Completions::LaneHere() const {
  if (here.lane >= kHidden) return here.lane + kHidden;
  // The first callback of a lane's thread is the lane's own call.
  const int lane = here.owner == nullptr ? here.callbacks : here.lane + std::max(1, here.callbacks);
  if (lane >= kHidden) return kOvertaking;
  return here.is_hidden ? lane + kHidden : lane;
}

std::deque<Completions::Call>& Completions::CallsOf(size_t number) {
  std::unique_ptr<Lane>& lane = lanes_[number];
  if (lane == nullptr) {
    lane = std::make_unique<Lane>();
    AddThread(number);
  }
  return lane->calls;
}

void Completions::AddThread(size_t number) {
  Lane& lane = *lanes_.at(number);
  for (const size_t over : std::exchange(lane.over, {})) lane.threads.erase(over);
  const size_t thread = ++lane.current;
  lane.busy_since.reset();
  lane.threads[thread] = Thread(absl::StrCat("thw-complete-", number),
                                [this, number, thread] { Run(number, thread); });
}

bool Completions::IsHere() const { return here.owner == this; }

void Completions::StandInFor(int lane) {
  if (here.owner != this || (here.lane != lane && here.lane != kOvertaking)) return;
  MutexLock lock(mutex_);
  const auto number = static_cast<size_t>(here.lane);
  if (!is_closed_ && here.thread == lanes_.at(number)->current) AddThread(number);
}

void Completions::StandInForLate(TimePoint now, Duration patience) {
  MutexLock lock(mutex_);
  if (is_closed_) return;
  for (const auto& [number, lane] : lanes_) {
    if (number >= kHidden && number < kOvertaking) continue;  // nobody's callbacks
    const bool is_late = lane->busy_since && now - *lane->busy_since > patience;
    if (!is_late || lane->calls.empty()) continue;
    lane->late.insert(lane->current);
    AddThread(number);
  }
}

absl::Status Completions::AwaitTurn(TimePoint deadline) {
  if (here.owner != this) return absl::OkStatus();
  MutexLock lock(mutex_);
  const auto is_its_turn = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const std::set<size_t>& late = lanes_.at(static_cast<size_t>(here.lane))->late;
    return is_closed_ || overtakes_ || late.empty() || *late.begin() >= here.thread;
  };
  if (changed_.WaitUntil(mutex_, deadline, is_its_turn)) return absl::OkStatus();
  return absl::DeadlineExceededError(
      "an earlier callback has not returned, whose collectives come before those of this one");
}

void Completions::Add(int lane, Call call) {
  {
    MutexLock lock(mutex_);
    if (!is_closed_) {
      CallsOf(overtakes_ && lane < kHidden ? kOvertaking : static_cast<size_t>(lane))
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
  std::deque<Call>& last = CallsOf(kOvertaking);
  for (const auto& [number, lane] : lanes_) {
    if (number >= kHidden) break;
    last.insert(last.end(), std::make_move_iterator(lane->calls.begin()),
                std::make_move_iterator(lane->calls.end()));
    lane->calls.clear();
  }
  overtakes_ = true;
  changed_.NotifyAll();
}

void Completions::Run(size_t number, size_t thread) {
  here = {this, static_cast<int>(number), thread, 0};
  while (true) {
    Call next;
    {
      MutexLock lock(mutex_);
      Lane& lane = *lanes_.at(number);
      if (lane.late.erase(thread) > 0) changed_.NotifyAll();
      if (thread != lane.current) {
        lane.over.push_back(thread);
        return;
      }
      lane.busy_since.reset();
      changed_.WaitUntil(mutex_, kUntilStopped, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return !lane.calls.empty() || is_closed_;
      });
      if (lane.calls.empty()) return;
      next = std::move(lane.calls.front());
      lane.calls.pop_front();
      lane.busy_since = Now();
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
    for (const auto& [number, lane] : lanes_) {
      for (auto& [of_lane, thread] : lane->threads) threads.push_back(&thread);
    }
  }
  for (Thread* thread : threads) thread->Join();
}

void Completions::DetachInChild() {
  for (const auto& [number, lane] : lanes_) {
    for (auto& [of_lane, thread] : lane->threads) thread.Detach();
  }
}

}  // namespace thalweg
