// Listener is the Unix socket on which a sidecar accepts connections from its node's workers.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "core/base/unique_fd.h"
#include "core/ipc/connection.h"

namespace thalweg {

// Thread-safe.
class Listener {
 public:
  // Listens at `path` (at most 107 bytes, in an existing folder) with mode 0600. A socket file
  // without a listener is replaced. Errors: InvalidArgument (path too long), NotFound (no such
  // folder), AlreadyExists (another process listens there, or a file that is no socket is in the
  // way). While the listener lives, `path`.lock keeps others from taking the path.
  static absl::StatusOr<std::unique_ptr<Listener>> Bind(const std::string& path);

  ~Listener();  // removes its files, if they are still its own
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  // Blocks until a process of this user or of root connects (others are dropped and logged) or
  // Stop() is called (Cancelled). ResourceExhausted: this process has no descriptors left.
  absl::StatusOr<std::unique_ptr<Connection>> Accept();

  // Ends Accept(), now and later. Idempotent; may be called from any thread.
  void Stop();

 private:
  Listener(std::string path, UniqueFd lock, UniqueFd socket, UniqueFd stop, ino_t inode);

  const std::string path_;
  UniqueFd lock_;    // holds the lock on path_ + ".lock"
  UniqueFd socket_;  // non-blocking
  UniqueFd stop_;    // eventfd, readable once stopped
  const ino_t inode_;
  const pid_t owner_;  // a forked child must not remove its parent's files
};

}  // namespace thalweg
