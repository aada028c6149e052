// Places count what may exist only so many times at once.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace thalweg {

// Places are thread-safe and must outlive the places that are taken.
class Places {
 public:
  explicit Places(uint32_t count) : count_(count) {}

  uint32_t count() const { return count_; }

  // Returns a place, which is free again when the last copy of the result is destroyed; null when
  // all places are taken.
  std::shared_ptr<void> Take() {
    if (taken_++ < count_) return {this, [](Places* places) { --places->taken_; }};
    --taken_;
    return nullptr;
  }

 private:
  const uint32_t count_;
  std::atomic<uint32_t> taken_{0};
};

}  // namespace thalweg
