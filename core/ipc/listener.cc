#include "core/ipc/listener.h"

#include <fcntl.h>
#include <poll.h>
#include <spdlog/spdlog.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "core/ipc/unix_address.h"

namespace thalweg {
namespace {

std::string LockPath(const std::string& path) { return path + ".lock"; }

absl::Status InUse(const std::string& path, const char* why) {
  return absl::AlreadyExistsError(absl::StrCat("cannot listen at '", path, "': ", why));
}

absl::Status SystemError(const std::string& path, const char* call, int error) {
  const std::string what =
      absl::StrCat("cannot listen at '", path, "': ", call, ": ", std::strerror(error));
  switch (error) {
    case ENOENT:
    case ENOTDIR:
      return absl::NotFoundError(absl::StrCat(what, ": create the folder first"));
    case EACCES:
    case EPERM:
    case EROFS:
      return absl::PermissionDeniedError(what);
    default:
      return absl::ResourceExhaustedError(what);
  }
}

// Takes the lock that makes one process the owner of `path`, without waiting. The lock ends with
// its process, so a crashed owner leaves nothing to clean up.
absl::StatusOr<UniqueFd> TakeLock(const std::string& path) {
  const std::string lock_path = LockPath(path);
  for (;;) {
    UniqueFd lock(open(lock_path.c_str(), O_CREAT | O_RDWR | O_CLOEXEC | O_NOFOLLOW, 0600));
    if (!lock.valid()) return SystemError(path, "opening its .lock file", errno);
    if (flock(lock.get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno == EWOULDBLOCK) return InUse(path, "another process listens there");
      return SystemError(path, "flock", errno);
    }
    // The previous owner may have removed the file between open and flock; the lock on it is then
    // worthless.
    struct stat locked = {};
    struct stat named = {};
    if (fstat(lock.get(), &locked) == 0 && stat(lock_path.c_str(), &named) == 0 &&
        locked.st_ino == named.st_ino && locked.st_dev == named.st_dev) {
      return lock;
    }
  }
}

// Removes a socket file at `path` that has no listener. Requires the lock.
absl::Status RemoveStale(const std::string& path, const sockaddr_un& address) {
  struct stat info = {};
  if (lstat(path.c_str(), &info) != 0) {
    return errno == ENOENT ? absl::OkStatus() : SystemError(path, "lstat", errno);
  }
  if (!S_ISSOCK(info.st_mode)) return InUse(path, "there is a file that is no socket");
  UniqueFd probe(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!probe.valid()) return SystemError(path, "socket", errno);
  if (connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 ||
      errno == EAGAIN) {
    return InUse(path, "another process listens there");
  }
  if (errno != ECONNREFUSED) return SystemError(path, "connect", errno);
  if (unlink(path.c_str()) != 0) return SystemError(path, "unlink", errno);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Listener>> Listener::Bind(const std::string& path) {
  THALWEG_ASSIGN_OR_RETURN(const sockaddr_un address, UnixAddress(path));
  THALWEG_ASSIGN_OR_RETURN(UniqueFd lock, TakeLock(path));
  absl::Cleanup unlock = [&] { unlink(LockPath(path).c_str()); };  // while the lock is held
  THALWEG_RETURN_IF_ERROR(RemoveStale(path, address));
  UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  UniqueFd stop(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!socket.valid() || !stop.valid()) return SystemError(path, "socket", errno);
  // The mode is set before bind, so that the file never has another mode.
  if (fchmod(socket.get(), 0600) != 0) return SystemError(path, "fchmod", errno);
  if (bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    return SystemError(path, "bind", errno);
  }
  struct stat info = {};
  if (stat(path.c_str(), &info) != 0) return SystemError(path, "stat", errno);
  if (listen(socket.get(), SOMAXCONN) != 0) return SystemError(path, "listen", errno);
  std::move(unlock).Cancel();
  return std::unique_ptr<Listener>(
      new Listener(path, std::move(lock), std::move(socket), std::move(stop), info.st_ino));
}

Listener::Listener(std::string path, UniqueFd lock, UniqueFd socket, UniqueFd stop, ino_t inode)
    : path_(std::move(path)),
      lock_(std::move(lock)),
      socket_(std::move(socket)),
      stop_(std::move(stop)),
      inode_(inode),
      owner_(getpid()) {}

Listener::~Listener() {
  if (getpid() != owner_) return;
  struct stat info = {};
  if (lstat(path_.c_str(), &info) == 0 && info.st_ino == inode_) unlink(path_.c_str());
  unlink(LockPath(path_).c_str());  // while the lock is held, so that it is our own
}

absl::StatusOr<std::unique_ptr<Connection>> Listener::Accept() {
  for (;;) {
    pollfd fds[2] = {{.fd = socket_.get(), .events = POLLIN, .revents = 0},
                     {.fd = stop_.get(), .events = POLLIN, .revents = 0}};
    // There is no deadline: the caller's thread exists to wait for peers, and Stop() ends the wait.
    if (poll(fds, 2, -1) < 0 && errno != EINTR) return SystemError(path_, "poll", errno);
    if (fds[1].revents != 0) return absl::CancelledError("the listener was stopped");
    UniqueFd socket(accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!socket.valid()) {
      if (errno == EAGAIN || errno == EINTR || errno == ECONNABORTED) continue;
      return SystemError(path_, "accept", errno);
    }
    auto connection = std::make_unique<Connection>(std::move(socket));
    const absl::StatusOr<PeerCredentials> peer = connection->Peer();
    if (peer.ok() && (peer->uid == geteuid() || peer->uid == 0)) return connection;
    spdlog::warn("connection at {} dropped: it comes from user {}, not from {} or root", path_,
                 peer.ok() ? std::to_string(peer->uid) : "unknown", geteuid());
  }
}

void Listener::Stop() {
  const uint64_t one = 1;
  // The write fails only when the counter is full, that is, after an earlier stop.
  if (write(stop_.get(), &one, sizeof one) < 0 && errno != EAGAIN) {
    spdlog::error("listener at {}: cannot stop: {}", path_, std::strerror(errno));
  }
}

}  // namespace thalweg
