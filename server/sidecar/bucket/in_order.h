// InOrder lets threads that do numbered work side by side pass on what they have made one by one.
#pragma once

#include <cstdint>
#include <map>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "core/base/mutex.h"

namespace thalweg {

// Thread-safe. No call waits for another one.
class InOrder {
 public:
  using Action = absl::AnyInvocable<absl::Status()>;

  // Does `action` when those of all smaller numbers, from 0, have been done, on the thread that did
  // the last of these. Each number comes once. Returns the first failure of the actions that this
  // call does; after one nothing is done any more.
  absl::Status Do(uint32_t number, Action action);

 private:
  Mutex mutex_;
  uint32_t next_ ABSL_GUARDED_BY(mutex_) = 0;
  bool is_doing_ ABSL_GUARDED_BY(mutex_) = false;  // some thread is
  std::map<uint32_t, Action> waiting_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace thalweg
