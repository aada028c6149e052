#include "server/sidecar/codec/fold_pool.h"

#include "absl/strings/str_cat.h"

namespace thalweg {

FoldPool::FoldPool(uint32_t threads) {
  for (uint32_t i = 1; i < threads; ++i) {
    helpers_.emplace_back(absl::StrCat("job-fold-", i), [this] { HelperLoop(); });
  }
}

FoldPool::~FoldPool() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  helpers_.clear();
}

absl::Status FoldPool::Run(uint32_t count, const std::function<absl::Status(uint32_t)>& work) {
  // Waking the helpers would take longer than the work.
  if (count <= 1) return count == 0 ? absl::OkStatus() : work(0);
  {
    MutexLock lock(mutex_);
    next_ = 0;
    count_ = count;
    work_ = &work;
    status_ = absl::OkStatus();
    busy_ = static_cast<uint32_t>(helpers_.size());
    ++runs_;
    changed_.NotifyAll();
  }
  TakeChunks(work, count);
  MutexLock lock(mutex_);
  // Each call of `work` has its own deadline.
  changed_.WaitUntil(mutex_, kUntilStopped,
                     [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return busy_ == 0; });
  return status_;
}

void FoldPool::TakeChunks(const std::function<absl::Status(uint32_t)>& work, uint32_t count) {
  for (uint32_t chunk = next_++; chunk < count; chunk = next_++) {
    const absl::Status status = work(chunk);
    if (status.ok()) continue;
    next_ = count;
    MutexLock lock(mutex_);
    if (status_.ok()) status_ = status;
  }
}

void FoldPool::HelperLoop() {
  uint64_t seen = 0;
  while (true) {
    const std::function<absl::Status(uint32_t)>* work = nullptr;
    uint32_t count = 0;
    {
      MutexLock lock(mutex_);
      changed_.WaitUntil(mutex_, kUntilStopped, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return stopping_ || runs_ != seen;
      });
      if (stopping_) return;
      seen = runs_;
      work = work_;
      count = count_;
    }
    TakeChunks(*work, count);
    MutexLock lock(mutex_);
    --busy_;
    changed_.NotifyAll();
  }
}

}  // namespace thalweg
