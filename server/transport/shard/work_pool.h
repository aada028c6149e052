// WorkPool is a few threads for work that the pollers must not wait for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <vector>

#include "core/base/mutex.h"
#include "core/base/thread.h"

namespace thalweg {

// A WorkPool is thread-safe. Its destructor waits for the work that has been taken.
class WorkPool {
 public:
  using Work = std::function<void()>;

  // At most `max_waiting` pieces of work wait for one of the `threads`.
  WorkPool(uint32_t threads, size_t max_waiting);
  ~WorkPool();

  // Returns false, and drops the work, when too much waits already.
  [[nodiscard]] bool TryRun(Work work);

 private:
  void Loop();

  const size_t max_waiting_;
  Mutex mutex_;
  CondVar changed_;
  std::deque<Work> waiting_ ABSL_GUARDED_BY(mutex_);
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<Thread> threads_;  // declared last, because they use everything above
};

}  // namespace thalweg
