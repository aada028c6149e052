// Completions tells a session's callers what has ended.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "core/base/clock.h"
#include "core/base/mutex.h"
#include "core/base/thread.h"

namespace thalweg {

// Completions makes calls on threads of its own, the lanes: each makes its calls in order. What a
// call begins is to be told on the next lane, so that the call may wait for it. A call that waits
// for another one of its own lane is left behind. Thread-safe.
class Completions {
 public:
  using Call = absl::AnyInvocable<void()>;

  Completions() = default;
  ~Completions() { Close(); }
  Completions(const Completions&) = delete;
  Completions& operator=(const Completions&) = delete;

  // A callback may be called by a lane, by whoever adds it to something complete, or by a thread of
  // others. While an InCallback lives, what its thread begins counts as begun by a callback.
  class InCallback {
   public:
    InCallback();
    ~InCallback();
    InCallback(const InCallback&) = delete;
    InCallback& operator=(const InCallback&) = delete;
  };

  // A collective may be made of several that nobody else sees. While a Hidden lives, what its
  // thread begins has lanes of its own, from kHidden on, so that callbacks neither wait for it nor
  // have an order with it. What such a lane begins in turn has lanes from 2 * kHidden on.
  static constexpr int kHidden = 64;
  class Hidden {
   public:
    Hidden();
    ~Hidden();
    Hidden(const Hidden&) = delete;
    Hidden& operator=(const Hidden&) = delete;
  };

  // Returns the lane of what the calling thread begins: one for each callback that it is in.
  // kOvertaking: these are too many.
  int LaneHere() const;
  // Returns whether the calling thread is one that makes calls.
  bool IsHere() const;
  // Makes `call` on the lane; here and at once after Close.
  void Add(int lane, Call call);
  // The calling thread is about to wait for a call of this lane. If it makes that lane's calls
  // itself, another thread makes them from now on.
  void StandInFor(int lane);
  // Does so for lanes whose call has run for longer than `patience` while others wait.
  void StandInForLate(TimePoint now, Duration patience);
  // For a call that begins what has an order among the ranks. Calls that StandInForLate has left
  // behind come first: waits until those of the calling thread's lane have returned, or no call
  // waits for another any more. DeadlineExceeded: they have not by then.
  absl::Status AwaitTurn(TimePoint deadline);
  // From now on no call waits for those that are running, neither those added before nor later: for
  // news that may be what a running call waits for. They are made in order, on a lane of their own;
  // hidden ones, for which others may wait, stay where they are.
  void Overtake();
  // Returns when all calls have been made. Not from a call.
  void Close();
  // Lets go of the lanes in a forked child, where they do not exist.
  void DetachInChild() ABSL_NO_THREAD_SAFETY_ANALYSIS;

 private:
  struct Lane {
    std::deque<Call> calls;
    size_t current = 0;                                  // the thread that makes the calls
    std::optional<TimePoint> busy_since = std::nullopt;  // of that one; nothing: it waits
    std::map<size_t, Thread> threads = {};               // by number
    std::vector<size_t> over = {};                       // those that were left behind and are done
    std::set<size_t> late = {};                          // left behind for their time, and not done
  };
  static constexpr int kOvertaking = 4 * kHidden;
  std::deque<Call>& CallsOf(size_t lane) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AddThread(size_t lane) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Makes a lane's calls as long as this thread is its current one.
  void Run(size_t lane, size_t thread);

  mutable Mutex mutex_;
  CondVar changed_;
  std::map<size_t, std::unique_ptr<Lane>> lanes_ ABSL_GUARDED_BY(mutex_);  // in use so far
  bool overtakes_ ABSL_GUARDED_BY(mutex_) = false;  // kOvertaking makes all further calls
  bool is_closed_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace thalweg
