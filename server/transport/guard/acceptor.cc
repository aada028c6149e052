#include "server/transport/guard/acceptor.h"

#include <linux/tcp.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "server/net/connections.h"
#include "server/transport/channel_options.h"
#include "spdlog/spdlog.h"

namespace thalweg {
namespace {

// So many connections are accepted before other sockets have their turn.
constexpr int kAcceptsAtATime = 64;
// Connections that end are noticed so late at most, when there are as many as there may be.
constexpr Duration kLookInterval = std::chrono::milliseconds(100);
// After this time the acceptor tries again whether a descriptor is free.
constexpr int kRetryMs = 100;

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

bool SetOption(const Socket& socket, int level, int option, int value) {
  return setsockopt(socket.fd(), level, option, &value, sizeof value) == 0;
}

// NotFound means that this host does not use the address.
absl::Status Failed(const char* what) {
  const bool unused = errno == EAFNOSUPPORT || errno == EADDRNOTAVAIL;
  const std::string why = absl::StrCat(what, ": ", strerror(errno));
  return unused ? absl::NotFoundError(why) : absl::UnavailableError(why);
}

// Returns what tells hosts apart, whatever addresses one has: the network, of 64 bits, in IPv6.
std::string HostOf(const sockaddr_storage& peer) {
  const auto& v4 = reinterpret_cast<const sockaddr_in&>(peer);
  const auto& v6 = reinterpret_cast<const sockaddr_in6&>(peer);
  const auto* const bytes = reinterpret_cast<const char*>(v6.sin6_addr.s6_addr);
  if (peer.ss_family == AF_INET) {
    return std::string(reinterpret_cast<const char*>(&v4.sin_addr), sizeof v4.sin_addr);
  }
  return IN6_IS_ADDR_V4MAPPED(&v6.sin6_addr) ? std::string(bytes + 12, 4) : std::string(bytes, 8);
}

// Returns a socket that listens; sets *port to the one that is bound.
absl::StatusOr<Socket> ListenOn(const addrinfo& address, int* port) {
  Socket socket(::socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (socket.fd() < 0) return Failed("socket");
  // Connections inherit the last two. Unacknowledged data ends a connection after the time that
  // gRPC's keepalive gives a ping.
  if (!SetOption(socket, SOL_SOCKET, SO_REUSEADDR, 1) ||
      !SetOption(socket, IPPROTO_TCP, TCP_NODELAY, 1) ||
      !SetOption(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, kKeepaliveTimeoutMs)) {
    return Failed("setsockopt");
  }
  sockaddr_storage bound{};
  std::memcpy(&bound, address.ai_addr, address.ai_addrlen);
  auto* v6 = reinterpret_cast<sockaddr_in6*>(&bound);
  auto* v4 = reinterpret_cast<sockaddr_in*>(&bound);
  const bool is_v6 = address.ai_family == AF_INET6;
  if (is_v6 && !SetOption(socket, IPPROTO_IPV6, IPV6_V6ONLY, 0)) return Failed("setsockopt");
  in_port_t& bound_port = is_v6 ? v6->sin6_port : v4->sin_port;
  bound_port = htons(static_cast<uint16_t>(*port));
  auto* any = reinterpret_cast<sockaddr*>(&bound);
  socklen_t length = address.ai_addrlen;
  if (bind(socket.fd(), any, length) != 0) return Failed("bind");
  if (listen(socket.fd(), SOMAXCONN) != 0) return Failed("listen");
  if (getsockname(socket.fd(), any, &length) != 0) return Failed("getsockname");
  *port = ntohs(bound_port);
  return socket;
}

}  // namespace

Socket& Socket::operator=(Socket&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

Socket::~Socket() {
  if (fd_ >= 0) close(fd_);
}

int Socket::Release() { return std::exchange(fd_, -1); }

uint32_t DefaultMaxDescriptor() {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  return static_cast<uint32_t>(
      std::min<rlim_t>(limit.rlim_cur - limit.rlim_cur / 4, kMaxConnectionDescriptor));
}

absl::StatusOr<std::unique_ptr<Acceptor>> Acceptor::Listen(HostPort* address, const Limits& limits,
                                                           Counter& refused) {
  addrinfo hints{};
  hints.ai_flags = AI_PASSIVE;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(address->host.c_str(), "0", &hints, &found);
  const Addresses addresses(found, &freeaddrinfo);
  if (error != 0) return absl::UnavailableError(gai_strerror(error));
  std::vector<Socket> listeners;
  absl::Status failed = absl::UnavailableError("the host has no address");
  int port = address->port;
  for (const addrinfo* a = addresses.get(); a != nullptr; a = a->ai_next) {
    absl::StatusOr<Socket> socket = ListenOn(*a, &port);
    if (socket.ok()) {
      listeners.push_back(*std::move(socket));
    } else if (absl::IsNotFound(socket.status())) {  // another address of a name may be ours
      failed = absl::UnavailableError(socket.status().message());
    } else {
      return socket.status();
    }
  }
  if (listeners.empty()) return failed;
  Socket stop(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (stop.fd() < 0) return Failed("eventfd");
  address->port = port;
  return std::unique_ptr<Acceptor>(
      new Acceptor(std::move(listeners), std::move(stop), limits, refused));
}

bool Acceptor::HasRoom(int fd, const std::string& host) {
  if (static_cast<uint32_t>(fd) >= limits_.descriptor) return false;
  if (!places_.MayTake(host, 1) && Now() - looked_ >= kLookInterval) {
    looked_ = Now();
    std::erase_if(open_, [this](const Open& each) {
      const bool has_ended = CookieOf(each.fd) != each.cookie;
      if (has_ended) places_.Return(each.host, 1);
      return has_ended;
    });
  }
  if (!places_.MayTake(host, 1)) return false;
  places_.Take(host, 1);
  open_.push_back({fd, CookieOf(fd), host});
  return true;
}

Acceptor::~Acceptor() { eventfd_write(stop_.fd(), 1); }

void Acceptor::Start(Handler handler) {
  handler_ = std::move(handler);
  thread_ = Thread("grpc-accept", [this] { Loop(); });
}

void Acceptor::Loop() {
  std::vector<pollfd> waits = {{stop_.fd(), POLLIN, 0}};
  for (const Socket& listener : listeners_) waits.push_back({listener.fd(), POLLIN, 0});
  bool has_room = true;
  while (true) {
    // Without a descriptor, the sockets stay readable, so that only the first is waited for.
    poll(waits.data(), has_room ? waits.size() : 1, has_room ? -1 : kRetryMs);
    if (waits[0].revents != 0) return;
    has_room = true;
    for (const Socket& listener : listeners_) has_room = AcceptAll(listener.fd()) && has_room;
  }
}

bool Acceptor::AcceptAll(int listener) {
  for (int i = 0; i < kAcceptsAtATime; ++i) {
    sockaddr_storage peer{};
    socklen_t length = sizeof peer;
    Socket connection(accept4(listener, reinterpret_cast<sockaddr*>(&peer), &length,
                              SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (connection.fd() < 0) {
      const bool is_full =
          errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
      if (is_full && log_.Admits(Now())) {
        spdlog::warn("connections wait: {}", strerror(errno));
      }
      // Other errors concern a connection that has ended in the meantime.
      if (is_full || errno == EAGAIN || errno == EWOULDBLOCK) return !is_full;
      if (errno == ECONNABORTED || errno == EINTR || errno == EPROTO) continue;
      return true;
    }
    const std::string host = HostOf(peer);
    if (HasRoom(connection.fd(), host)) {
      handler_(listener, connection.Release());
      continue;
    }
    refused_.Add(1);
    if (log_.Admits(Now())) LogRefused(TextOf(peer), host);
  }
  return true;
}

void Acceptor::LogRefused(const std::string& peer, const std::string& host) const {
  const uint64_t own = places_.taken_by(host);
  spdlog::warn(
      "refused a connection from {}: of {} that may be open, its host or network has {} and others "
      "have {}, and one may have as many as it leaves free; if these are nodes, raise "
      "--memory-limit or the limit of open files",
      peer, places_.count(), own, places_.taken() - own);
}

}  // namespace thalweg
