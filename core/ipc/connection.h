// Connection is one end of a Unix stream socket that carries frames (message.h) and file
// descriptors.
#pragma once

#include <sys/types.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/base/clock.h"
#include "core/base/mutex.h"
#include "core/base/unique_fd.h"
#include "core/ipc/message.h"

namespace thalweg {

struct PeerCredentials {
  pid_t pid = 0;
  uid_t uid = 0;
  gid_t gid = 0;
};

struct Received {
  ipc::Message message;
  UniqueFd fd;  // valid when the message had a descriptor
};

// Send waits this long for a peer that does not read.
inline constexpr Duration kSendTimeout = std::chrono::seconds(10);

// A Connection is thread-safe for one reader and any number of writers.
class Connection {
 public:
  // Connects to the listener at `path`. Fails at once with Unavailable when there is none; waits
  // until `deadline` (DeadlineExceeded) only while the listener's queue is full.
  static absl::StatusOr<std::unique_ptr<Connection>> Connect(const std::string& path,
                                                             TimePoint deadline);

  // `socket` is a connected Unix stream socket. `send_timeout` is for tests.
  explicit Connection(UniqueFd socket, Duration send_timeout = kSendTimeout);
  ~Connection();  // the peer reads what was sent, then the end
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  // Writes the whole frame, with a copy of `fd` unless that is negative; `fd` remains the caller's.
  // Errors: InvalidArgument (the message is too long; nothing was sent), Unavailable (the
  // connection is closed; what the peer sent before can still be received), DeadlineExceeded (the
  // peer does not read; the connection is shut down, because the frame may be incomplete).
  absl::Status Send(const ipc::Message& message, int fd = -1);

  // For a writer that keeps a queue of its own and is the only one to send from then on: writes as
  // much of `bytes`, which are a frame's or the rest of one, as the socket takes without waiting,
  // and returns how many bytes that was. `fd` goes with the first byte, as in Send. Unavailable:
  // the connection is closed.
  absl::StatusOr<size_t> SendSome(absl::string_view bytes, int fd = -1);
  // Waits until SendSome can go on, or the connection is closed. DeadlineExceeded: it cannot.
  absl::Status WaitForRoom(TimePoint deadline) const;

  // Returns the next message. DeadlineExceeded keeps the received part of a frame for the next
  // call; a deadline in the past returns only what has already arrived. Unavailable: the peer has
  // closed, or Shutdown() was called. InvalidArgument: the peer broke the protocol. The last two
  // are final.
  absl::StatusOr<Received> Receive(TimePoint deadline);

  // Returns the process at the other end at the time of the connection.
  absl::StatusOr<PeerCredentials> Peer() const;

  // Ends the connection in both directions: reader and writers return Unavailable, and so do the
  // peer's. Idempotent; any thread.
  void Shutdown();

  // Closes the child's copy of the descriptor in a forked child, where no other thread uses it; the
  // parent's connection stays as it is.
  void CloseInChild();

 private:
  // A Partial is the frame that is being received.
  struct Partial {
    std::array<std::byte, ipc::kFrameHeaderBytes> header_bytes;
    size_t header_have = 0;
    ipc::FrameHeader header;
    std::vector<std::byte> body;
    size_t body_have = 0;
    UniqueFd fd;
  };

  absl::Status WriteAll(const std::string& frame, int fd)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(send_mutex_);
  absl::Status WaitFor(short events, TimePoint deadline) const;
  absl::StatusOr<Received> ReceiveFrame(TimePoint deadline);
  absl::Status ReadExactly(std::byte* data, size_t size, size_t& have, TimePoint deadline);
  absl::StatusOr<size_t> ReadSome(std::byte* data, size_t size);

  UniqueFd socket_;
  const Duration send_timeout_;
  // Relaxed suffices: shutdown(2) itself wakes the waiters, and the flag only says why.
  std::atomic<bool> shut_down_{false};
  Mutex send_mutex_;       // keeps frames of different writers apart
  Partial partial_;        // used by the reader only
  absl::Status received_;  // used by the reader only: the error once receiving has failed for good
};

}  // namespace thalweg
