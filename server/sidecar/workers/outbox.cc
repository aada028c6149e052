#include "server/sidecar/workers/outbox.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace thalweg {
namespace {

// The sender waits this long for room before it checks whether the outbox is to end.
constexpr Duration kLookForRoom = std::chrono::milliseconds(100);

}  // namespace

Outbox::Outbox(std::shared_ptr<Connection> connection, Limits limits,
               std::function<void(const absl::Status&)> on_stuck)
    : connection_(std::move(connection)), limits_(limits), on_stuck_(std::move(on_stuck)) {
  sender_ = Thread("worker-sender", [this] { SendLoop(); });
}

Outbox::~Outbox() { Close(); }

void Outbox::Close() {
  {
    MutexLock lock(mutex_);
    CloseLocked();
  }
  sender_.Join();
}

void Outbox::Post(const ipc::Message& message, int fd) {
  std::string frame = ipc::EncodeFrame(message, fd >= 0);
  absl::Status status;
  {
    MutexLock lock(mutex_);
    if (closed_) return;
    status = PostLocked(message, std::move(frame), fd);
    if (!status.ok()) CloseLocked();
  }
  if (!status.ok()) GiveUp(status);
}

absl::Status Outbox::PostLocked(const ipc::Message& message, std::string frame, int fd) {
  Pending last{std::move(frame), UniqueFd(), 0};
  if (pending_.empty()) {
    const auto sent = connection_->SendSome(last.frame, fd);
    if (!sent.ok()) {  // the reader notices
      CloseLocked();
      return absl::OkStatus();
    }
    last.sent = *sent;
    if (last.sent == last.frame.size()) return absl::OkStatus();
    last_room_ = Now();
  } else if (bytes_ + last.Bytes() > limits_.bytes) {
    return absl::ResourceExhaustedError(absl::StrCat("does not read: ", pending_.size(),
                                                     " messages of ", bytes_ >> 10,
                                                     " KiB to it are pending"));
  }
  if (fd >= 0 && last.sent == 0) {
    last.fd = UniqueFd(dup(fd));
    if (!last.fd.valid()) {
      return absl::ResourceExhaustedError(
          absl::StrCat("cannot be sent ", Name(message), ": this process has no descriptors left"));
    }
  }
  bytes_ += last.Bytes();
  pending_.push_back(std::move(last));
  changed_.NotifyAll();
  return absl::OkStatus();
}

void Outbox::CloseLocked() {
  closed_ = true;
  pending_.clear();
  bytes_ = 0;
  changed_.NotifyAll();
}

void Outbox::GiveUp(const absl::Status& why) {
  on_stuck_(why);
  connection_->Shutdown();
}

void Outbox::SendLoop() {
  for (;;) {
    TimePoint deadline;
    {
      MutexLock lock(mutex_);
      changed_.WaitUntil(mutex_, kUntilStopped, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return closed_ || !pending_.empty();
      });
      if (closed_) return;
      deadline = last_room_ + limits_.patience;
    }
    // A socket counts as writable only when it is nearly empty: also looks without being told.
    connection_->WaitForRoom(std::min(deadline, Now() + kLookForRoom)).IgnoreError();
    SendPending();
    {
      MutexLock lock(mutex_);
      if (pending_.empty() || Now() < last_room_ + limits_.patience) continue;
      CloseLocked();
    }
    return GiveUp(absl::DeadlineExceededError(
        absl::StrCat("has read nothing for ", ToSeconds(limits_.patience), " s")));
  }
}

void Outbox::SendPending() {
  MutexLock lock(mutex_);
  while (!pending_.empty()) {
    Pending& next = pending_.front();
    const auto sent = connection_->SendSome(absl::string_view(next.frame).substr(next.sent),
                                            next.sent == 0 ? next.fd.get() : -1);
    if (!sent.ok()) return CloseLocked();  // the reader notices
    if (*sent == 0) return;
    last_room_ = Now();
    next.sent += *sent;
    if (next.sent < next.frame.size()) continue;
    bytes_ -= next.Bytes();
    pending_.pop_front();
  }
  changed_.NotifyAll();
}

void Outbox::Flush(TimePoint deadline) {
  MutexLock lock(mutex_);
  changed_.WaitUntil(mutex_, deadline, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return closed_ || pending_.empty();
  });
}

}  // namespace thalweg
