// Messages on their way to one worker. Nobody who posts a message waits for the worker to read it.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "core/base/clock.h"
#include "core/base/mutex.h"
#include "core/base/thread.h"
#include "core/base/unique_fd.h"
#include "core/ipc/connection.h"
#include "core/ipc/message.h"

namespace thalweg {

// Thread-safe. Sends in the order of posting: at once, on the poster's thread, while the socket has
// room; otherwise messages wait in a queue that a thread of the outbox sends. From its creation on
// nobody else may send through the connection.
class Outbox {
 public:
  struct Limits {
    size_t bytes = 16 << 20;           // of the queue
    Duration patience = kSendTimeout;  // how long the worker may read nothing
  };

  // `on_stuck` is called at most once, without a lock, by the thread of a poster or of the outbox:
  // the queue is full, or the worker has read nothing for too long. Afterwards the connection is
  // shut down.
  Outbox(std::shared_ptr<Connection> connection, Limits limits,
         std::function<void(const absl::Status&)> on_stuck);
  ~Outbox();  // closes
  Outbox(const Outbox&) = delete;
  Outbox& operator=(const Outbox&) = delete;

  // Sends or queues the message, which must be within the bounds of message.h, with a copy of `fd`
  // unless that is negative. Does not block.
  // A worker that has gone is noticed by the thread that reads from it: for one, and for one that
  // is stuck, messages are dropped.
  void Post(const ipc::Message& message, int fd = -1);

  // Waits until all that has been posted is sent, or dropped, or until `deadline`.
  void Flush(TimePoint deadline);

  // Drops what has not been sent and ends the thread. Idempotent; not from two threads at once.
  void Close();

  Connection& connection() const { return *connection_; }

 private:
  struct Pending {
    std::string frame;
    UniqueFd fd;
    size_t sent = 0;  // bytes

    size_t Bytes() const { return frame.size() + sizeof(*this); }
  };

  absl::Status PostLocked(const ipc::Message& message, std::string frame, int fd)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CloseLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SendLoop();
  // Sends what there is room for.
  void SendPending();
  void GiveUp(const absl::Status& why);

  const std::shared_ptr<Connection> connection_;  // shared with the thread that reads from it
  const Limits limits_;
  const std::function<void(const absl::Status&)> on_stuck_;

  Mutex mutex_;
  CondVar changed_;
  std::deque<Pending> pending_ ABSL_GUARDED_BY(mutex_);
  size_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;     // of what is pending
  TimePoint last_room_ ABSL_GUARDED_BY(mutex_);  // when the socket last took something, or had to
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;  // nothing is sent any more

  Thread sender_;
};

}  // namespace thalweg
