// ForkGuard detects a fork. PyTorch's DataLoader forks workers from the training process; such a
// child has copies of the parent's descriptors but none of its threads, and a connection whose copy
// stays open in a child would hide the parent's death from the sidecar.
#pragma once

#include <sys/types.h>

#include <functional>

namespace thalweg {

// Calls `in_child` in every forked child, before fork returns there. `in_child` must only do what
// is safe between fork and exec: no locks, no allocation. Thread-safe.
class ForkGuard {
 public:
  explicit ForkGuard(std::function<void()> in_child);
  ~ForkGuard();
  ForkGuard(const ForkGuard&) = delete;
  ForkGuard& operator=(const ForkGuard&) = delete;

  // Returns true in a process forked from the one that made this object.
  bool InChild() const;

 private:
  const pid_t owner_;
  const std::function<void()> in_child_;
  friend class ForkRegistry;
};

}  // namespace thalweg
