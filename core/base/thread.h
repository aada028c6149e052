// A Thread is named and is joined by its destructor, unless it has been detached.
// Thread-compatible.
#pragma once

#include <pthread.h>
#include <time.h>

#include <chrono>
#include <string>
#include <thread>
#include <utility>

#include "core/base/clock.h"

namespace thalweg {

class Thread {
 public:
  Thread() = default;
  // top and gdb show `name`; the kernel keeps its first 15 characters.
  template <typename Function>
  Thread(std::string name, Function&& body)
      : thread_([name = std::move(name), body = std::forward<Function>(body)]() mutable {
          pthread_setname_np(pthread_self(), name.substr(0, 15).c_str());
          body();
        }) {}
  Thread(Thread&&) = default;
  Thread& operator=(Thread&& other) {
    Join();
    thread_ = std::move(other.thread_);
    return *this;
  }
  ~Thread() { Join(); }

  // Joins the thread. Idempotent. Must not be called from the thread itself.
  void Join() {
    if (thread_.joinable()) thread_.join();
  }
  // Detaches instead of joining: for a thread that does not exist (in a forked child) or may never
  // end.
  void Detach() {
    if (thread_.joinable()) thread_.detach();
  }
  // Returns the processor time that the thread has used. Requires that it has not been joined.
  Duration ProcessorTime() {
    clockid_t clock{};
    timespec used{};
    if (pthread_getcpuclockid(thread_.native_handle(), &clock) == 0) clock_gettime(clock, &used);
    return std::chrono::seconds(used.tv_sec) + std::chrono::nanoseconds(used.tv_nsec);
  }

 private:
  std::thread thread_;
};

}  // namespace thalweg
