// UniqueFd owns a file descriptor. It is thread-compatible.
#pragma once

#include <unistd.h>

#include <utility>

namespace thalweg {

class UniqueFd {
 public:
  // Takes ownership of `fd`; a negative value means none.
  explicit UniqueFd(int fd = -1) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(other.release()) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = other.release();
    }
    return *this;
  }
  ~UniqueFd() { reset(); }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }

  // Gives up ownership: the caller must close the descriptor.
  int release() { return std::exchange(fd_, -1); }

  // Closes the descriptor, if there is one.
  void reset() {
    // Linux frees the number even when close() reports an error, so there is nothing to retry.
    if (const int fd = release(); fd >= 0) ::close(fd);
  }

 private:
  int fd_;
};

}  // namespace thalweg
