#include "client/core/fork_guard.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

namespace thalweg {

// pthread_atfork has no way to unregister, so one handler serves a list for the life of the
// process.
class ForkRegistry {
 public:
  static ForkRegistry& Get() {
    // never destroyed, because a fork may come at any time
    static auto* registry = new ForkRegistry;
    return *registry;
  }
  void Add(const ForkGuard* guard) {
    std::lock_guard<std::mutex> lock(mutex_);
    guards_.push_back(guard);
  }
  void Remove(const ForkGuard* guard) {
    std::lock_guard<std::mutex> lock(mutex_);
    guards_.erase(std::remove(guards_.begin(), guards_.end(), guard), guards_.end());
  }

 private:
  // The lock is held across the fork, so that the child's list is consistent.
  ForkRegistry() { pthread_atfork(&Prepare, &InParent, &InChild); }
  static void Prepare() { Get().mutex_.lock(); }
  static void InParent() { Get().mutex_.unlock(); }
  static void InChild() {
    for (const ForkGuard* guard : Get().guards_) guard->in_child_();
    Get().mutex_.unlock();
  }

  std::mutex mutex_;
  std::vector<const ForkGuard*> guards_;
};

ForkGuard::ForkGuard(std::function<void()> in_child)
    : owner_(getpid()), in_child_(std::move(in_child)) {
  ForkRegistry::Get().Add(this);
}

ForkGuard::~ForkGuard() { ForkRegistry::Get().Remove(this); }

bool ForkGuard::InChild() const { return getpid() != owner_; }

}  // namespace thalweg
