// Threads that share the chunks of one bucket.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "core/base/mutex.h"
#include "core/base/thread.h"

namespace thalweg {

// Run is called by one thread at a time.
class FoldPool {
 public:
  // The caller of Run is one of the `threads` ≥ 1.
  explicit FoldPool(uint32_t threads);
  ~FoldPool();

  // Calls work(0) … work(count-1), each once, begun in that order, by all threads. Returns when all
  // that were begun have ended. The first failure is returned and nothing is begun after it.
  absl::Status Run(uint32_t count, const std::function<absl::Status(uint32_t)>& work);

 private:
  void HelperLoop();
  void TakeChunks(const std::function<absl::Status(uint32_t)>& work, uint32_t count);

  std::atomic<uint32_t> next_{0};

  Mutex mutex_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t runs_ ABSL_GUARDED_BY(mutex_) = 0;  // begun so far
  uint32_t busy_ ABSL_GUARDED_BY(mutex_) = 0;  // helpers that have not finished the last run
  uint32_t count_ ABSL_GUARDED_BY(mutex_) = 0;
  const std::function<absl::Status(uint32_t)>* work_ ABSL_GUARDED_BY(mutex_) = nullptr;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);

  std::vector<Thread> helpers_;
};

}  // namespace thalweg
