#include "server/base/log_limit.h"

#include <spdlog/spdlog.h>

#include <chrono>

namespace thalweg {

bool LogLimit::Admits(TimePoint now) {
  uint64_t left_out = 0;
  bool admitted = false;
  {
    MutexLock lock(mutex_);
    if (now - begin_ >= std::chrono::minutes(1)) {
      left_out = left_out_;
      begin_ = now;
      admitted_ = 0;
      left_out_ = 0;
    }
    admitted = admitted_ < kLinesPerMinute;
    if (admitted) {
      ++admitted_;
    } else {
      ++left_out_;
    }
  }
  if (left_out > 0) spdlog::warn("{} more messages {} were left out", left_out, kind_);
  return admitted;
}

}  // namespace thalweg
