// BreakingProxy is a TCP proxy for this room's tests whose connections can be broken.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/base/mutex.h"
#include "core/base/thread.h"

namespace thalweg {

// A BreakingProxy forwards bytes between whoever connects to it and one target on 127.0.0.1. It is
// thread-safe.
class BreakingProxy {
 public:
  // A Budget returns how many bytes the next connection may carry before it is reset.
  using Budget = std::function<uint64_t()>;

  explicit BreakingProxy(uint16_t target_port, Budget budget = nullptr);
  ~BreakingProxy();

  std::string address() const;
  // Resets all connections, and returns when nothing is forwarded on them any more.
  void Break();
  // Says whether new connections are taken; otherwise they are reset.
  void SetOpen(bool is_open);
  // The number of connections that were reset.
  int breaks() const;

 private:
  struct Pair {
    int ends[2] = {-1, -1};
    uint64_t budget = 0;
  };

  void Loop();
  void AcceptOne();
  // Forwards what end `from` of the pair has sent; returns false when the connection is over.
  bool Forward(Pair& pair, int from);
  void Reset(Pair& pair);

  const uint16_t target_port_;
  const Budget budget_;
  int listener_ = -1;
  int wake_[2] = {-1, -1};
  uint16_t port_ = 0;

  mutable Mutex mutex_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_open_ ABSL_GUARDED_BY(mutex_) = true;
  bool break_all_ ABSL_GUARDED_BY(mutex_) = false;
  int breaks_ ABSL_GUARDED_BY(mutex_) = 0;

  std::vector<Pair> pairs_;  // used by the thread only
  std::unique_ptr<Thread> thread_;
};

}  // namespace thalweg
