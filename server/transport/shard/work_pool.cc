#include "server/transport/shard/work_pool.h"

#include <utility>

namespace thalweg {

WorkPool::WorkPool(uint32_t threads, size_t max_waiting) : max_waiting_(max_waiting) {
  for (uint32_t i = 0; i < threads; ++i) threads_.emplace_back("grpc-work", [this] { Loop(); });
}

WorkPool::~WorkPool() {
  {
    MutexLock lock(mutex_);
    stopped_ = true;
    changed_.NotifyAll();
  }
  threads_.clear();
}

bool WorkPool::TryRun(Work work) {
  MutexLock lock(mutex_);
  if (waiting_.size() >= max_waiting_) return false;
  waiting_.push_back(std::move(work));
  changed_.NotifyAll();
  return true;
}

void WorkPool::Loop() {
  while (true) {
    Work work;
    {
      MutexLock lock(mutex_);
      changed_.WaitUntil(mutex_, kUntilStopped, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return stopped_ || !waiting_.empty();
      });
      if (waiting_.empty()) return;
      work = std::move(waiting_.front());
      waiting_.pop_front();
    }
    work();
  }
}

}  // namespace thalweg
