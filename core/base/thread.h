// A named thread that is joined, unless it is let go of. Thread-compatible.
#pragma once

#include <pthread.h>

#include <string>
#include <thread>
#include <utility>

namespace thalweg {

class Thread {
 public:
  Thread() = default;
  // `name` is what top and gdb show; the kernel keeps its first 15 characters.
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

  // Idempotent. Must not be called from the thread itself.
  void Join() {
    if (thread_.joinable()) thread_.join();
  }
  // Lets go without joining: of one that does not exist (in a forked child), or may never end.
  void Detach() {
    if (thread_.joinable()) thread_.detach();
  }

 private:
  std::thread thread_;
};

}  // namespace thalweg
