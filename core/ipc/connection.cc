#include "core/ipc/connection.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "core/ipc/unix_address.h"

namespace thalweg {
namespace {

constexpr size_t kMaxFdsTaken = 2;  // one more than allowed, so that a second one is detected

absl::Status ConnectError(const std::string& path, int error) {
  const std::string what =
      absl::StrCat("cannot connect to the sidecar at '", path, "': ", std::strerror(error));
  switch (error) {
    case EAGAIN:
      return absl::DeadlineExceededError(absl::StrCat(what, ": it does not accept connections"));
    case EACCES:
    case EPERM:
      return absl::PermissionDeniedError(absl::StrCat(what, ": it serves only its own user"));
    default:
      return absl::UnavailableError(
          absl::StrCat(what, ": start a sidecar there, or correct THALWEG_SIDECAR"));
  }
}

// Sets the timeout for connect(2), whose wait has no other bound. Sending does not wait in the
// kernel.
absl::Status SetSendTimeout(int fd, Duration timeout) {
  const int64_t micros = std::max<int64_t>(1, ToNanos(timeout) / 1000);  // 0 would mean no timeout
  const timeval value = {.tv_sec = micros / 1'000'000, .tv_usec = micros % 1'000'000};
  if (setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &value, sizeof value) == 0) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("SO_SNDTIMEO: ", std::strerror(errno)));
}

// Takes every descriptor that came with `header`, so that none is leaked.
std::vector<UniqueFd> TakeFds(msghdr& header) {
  std::vector<UniqueFd> fds;
  for (cmsghdr* c = CMSG_FIRSTHDR(&header); c != nullptr; c = CMSG_NXTHDR(&header, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(c) + i * sizeof fd, sizeof fd);
      fds.emplace_back(fd);
    }
  }
  return fds;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Connection>> Connection::Connect(const std::string& path,
                                                                TimePoint deadline) {
  THALWEG_ASSIGN_OR_RETURN(const sockaddr_un address, UnixAddress(path));
  UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket.valid()) {
    return absl::ResourceExhaustedError(absl::StrCat("socket: ", std::strerror(errno)));
  }
  for (;;) {
    THALWEG_RETURN_IF_ERROR(SetSendTimeout(socket.get(), Remaining(deadline, Now())));
    if (connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) {
      return std::make_unique<Connection>(std::move(socket));
    }
    if (errno != EINTR) return ConnectError(path, errno);
  }
}

Connection::Connection(UniqueFd socket, Duration send_timeout)
    : socket_(std::move(socket)), send_timeout_(send_timeout) {}

// The socket is shut down, not just closed: a forked child may still hold a copy of the descriptor,
// and the peer would see the end only when that child ends.
Connection::~Connection() { Shutdown(); }

absl::Status Connection::Send(const ipc::Message& message, int fd) {
  const std::string frame = ipc::EncodeFrame(message, fd >= 0);
  if (frame.size() - ipc::kFrameHeaderBytes > ipc::kMaxFrameBytes) {
    return absl::InvalidArgumentError(absl::StrCat(Name(message), " takes ", frame.size(),
                                                   " bytes, at most ", ipc::kMaxFrameBytes,
                                                   " are allowed"));
  }
  MutexLock lock(send_mutex_);
  absl::Status sent = WriteAll(frame, fd);
  if (!sent.ok()) {
    if (absl::IsDeadlineExceeded(sent)) Shutdown();
    sent = absl::Status(sent.code(), absl::StrCat("sending ", Name(message), ": ", sent.message()));
  }
  return sent;
}

absl::Status Connection::WriteAll(const std::string& frame, int fd) {
  const TimePoint deadline = Now() + send_timeout_;
  for (size_t done = 0; done < frame.size();) {
    const auto rest = absl::string_view(frame).substr(done);
    THALWEG_ASSIGN_OR_RETURN(const size_t written, SendSome(rest, done == 0 ? fd : -1));
    done += written;
    if (written > 0) continue;
    const absl::Status writable = WaitForRoom(deadline);
    if (absl::IsDeadlineExceeded(writable)) {
      return absl::DeadlineExceededError(absl::StrCat(
          "the peer has read nothing for ", ToSeconds(send_timeout_), " s, connection closed"));
    }
    THALWEG_RETURN_IF_ERROR(writable);
  }
  return absl::OkStatus();
}

absl::StatusOr<size_t> Connection::SendSome(absl::string_view bytes, int fd) {
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  iovec piece = {.iov_base = const_cast<char*>(bytes.data()), .iov_len = bytes.size()};
  msghdr header = {};
  header.msg_iov = &piece;
  header.msg_iovlen = 1;
  if (fd >= 0) {  // it goes with the first byte
    header.msg_control = control;
    header.msg_controllen = sizeof control;
    cmsghdr* rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof fd);
    std::memcpy(CMSG_DATA(rights), &fd, sizeof fd);
  }
  for (;;) {
    if (shut_down_.load(std::memory_order_relaxed)) {
      return absl::UnavailableError("the connection is closed");
    }
    const ssize_t n = sendmsg(socket_.get(), &header, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n >= 0) return static_cast<size_t>(n);
    if (errno == EAGAIN) return 0;
    if (errno == EINTR) continue;
    const bool closed_by_peer = errno == EPIPE || errno == ECONNRESET;
    const std::string why = std::strerror(errno);
    // Messages that the peer sent before it closed, such as the reason, can still be received.
    if (closed_by_peer) {
      return absl::UnavailableError(absl::StrCat("the connection is closed: ", why));
    }
    Shutdown();
    return absl::UnavailableError(absl::StrCat("the connection is closed after: ", why));
  }
}

absl::Status Connection::WaitForRoom(TimePoint deadline) const {
  return WaitFor(POLLOUT, deadline);
}

absl::Status Connection::WaitFor(short events, TimePoint deadline) const {
  for (;;) {
    const int64_t nanos = ToNanos(Remaining(deadline, Now()));
    const timespec timeout = {.tv_sec = static_cast<time_t>(nanos / 1'000'000'000),
                              .tv_nsec = static_cast<long>(nanos % 1'000'000'000)};
    pollfd poll_fd = {.fd = socket_.get(), .events = events, .revents = 0};
    const int ready = ppoll(&poll_fd, 1, &timeout, nullptr);
    if (ready > 0) return absl::OkStatus();  // the next call reports an error or the end
    if (ready == 0) return absl::DeadlineExceededError("the peer sent nothing before the deadline");
    if (errno != EINTR) return absl::UnavailableError(absl::StrCat("poll: ", std::strerror(errno)));
  }
}

absl::StatusOr<Received> Connection::Receive(TimePoint deadline) {
  THALWEG_RETURN_IF_ERROR(received_);
  absl::StatusOr<Received> received = ReceiveFrame(deadline);
  if (!received.ok() && !absl::IsDeadlineExceeded(received.status())) {
    received_ = received.status();
    partial_ = Partial();
  }
  return received;
}

absl::StatusOr<Received> Connection::ReceiveFrame(TimePoint deadline) {
  if (partial_.header_have < ipc::kFrameHeaderBytes) {
    THALWEG_RETURN_IF_ERROR(ReadExactly(partial_.header_bytes.data(), ipc::kFrameHeaderBytes,
                                        partial_.header_have, deadline));
    THALWEG_ASSIGN_OR_RETURN(partial_.header, ipc::ParseFrameHeader(partial_.header_bytes));
    partial_.body.resize(partial_.header.body_bytes);
  }
  THALWEG_RETURN_IF_ERROR(
      ReadExactly(partial_.body.data(), partial_.body.size(), partial_.body_have, deadline));
  Partial frame = std::exchange(partial_, Partial());
  if (frame.header.has_fd != frame.fd.valid()) {
    return absl::InvalidArgumentError(frame.fd.valid()
                                          ? "a descriptor came with a frame that announces none"
                                          : "a frame announces a descriptor, but none came");
  }
  THALWEG_ASSIGN_OR_RETURN(ipc::Message message, ipc::ParseBody(frame.header.type, frame.body));
  return Received{std::move(message), std::move(frame.fd)};
}

absl::Status Connection::ReadExactly(std::byte* data, size_t size, size_t& have,
                                     TimePoint deadline) {
  while (have < size) {
    THALWEG_ASSIGN_OR_RETURN(const size_t n, ReadSome(data + have, size - have));
    have += n;
    if (n == 0) THALWEG_RETURN_IF_ERROR(WaitFor(POLLIN, deadline));
  }
  return absl::OkStatus();
}

// Returns 0 when no bytes are there yet; the end of the stream is an error.
absl::StatusOr<size_t> Connection::ReadSome(std::byte* data, size_t size) {
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxFdsTaken * sizeof(int))];
  iovec piece = {.iov_base = data, .iov_len = size};
  msghdr header = {};
  header.msg_iov = &piece;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof control;
  if (shut_down_.load(std::memory_order_relaxed)) {
    return absl::UnavailableError("the connection was closed at this end");
  }
  const ssize_t n = recvmsg(socket_.get(), &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (n < 0) {
    if (errno == EAGAIN || errno == EINTR) return 0;
    return absl::UnavailableError(
        absl::StrCat("the peer closed the connection: ", std::strerror(errno)));
  }
  std::vector<UniqueFd> fds = TakeFds(header);
  if (n == 0) {
    const bool between_frames = partial_.header_have == 0;
    return absl::UnavailableError(between_frames
                                      ? "the peer closed the connection"
                                      : "the peer closed the connection in the middle of a frame");
  }
  if ((header.msg_flags & MSG_CTRUNC) != 0 || fds.size() + (partial_.fd.valid() ? 1 : 0) > 1) {
    return absl::InvalidArgumentError(
        "more than one descriptor came with a frame, or this process has none left");
  }
  if (!fds.empty()) partial_.fd = std::move(fds.front());
  return static_cast<size_t>(n);
}

absl::StatusOr<PeerCredentials> Connection::Peer() const {
  ucred peer = {};
  socklen_t size = sizeof peer;
  if (getsockopt(socket_.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) {
    return absl::UnavailableError(absl::StrCat("SO_PEERCRED: ", std::strerror(errno)));
  }
  return PeerCredentials{peer.pid, peer.uid, peer.gid};
}

void Connection::Shutdown() {
  shut_down_.store(true, std::memory_order_relaxed);
  ::shutdown(socket_.get(), SHUT_RDWR);
}

void Connection::CloseInChild() {
  shut_down_.store(true, std::memory_order_relaxed);
  socket_.reset();
}

}  // namespace thalweg
