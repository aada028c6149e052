#include "server/net/connections.h"

#include <arpa/inet.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>

#include "absl/strings/str_cat.h"

namespace thalweg {

int LocalPort(int fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) return 0;
  if (address.ss_family == AF_INET) {
    return ntohs(reinterpret_cast<const sockaddr_in&>(address).sin_port);
  }
  if (address.ss_family == AF_INET6) {
    return ntohs(reinterpret_cast<const sockaddr_in6&>(address).sin6_port);
  }
  return 0;
}

std::string PeerOf(int fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) return "";
  return TextOf(address);
}

std::string TextOf(const sockaddr_storage& address) {
  char host[INET6_ADDRSTRLEN] = "";
  if (address.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(address);
    inet_ntop(AF_INET, &v4.sin_addr, host, sizeof host);
    return absl::StrCat(host, ":", ntohs(v4.sin_port));
  }
  if (address.ss_family != AF_INET6) return "";
  const auto& v6 = reinterpret_cast<const sockaddr_in6&>(address);
  if (IN6_IS_ADDR_V4MAPPED(&v6.sin6_addr)) {
    inet_ntop(AF_INET, &v6.sin6_addr.s6_addr[12], host, sizeof host);
    return absl::StrCat(host, ":", ntohs(v6.sin6_port));
  }
  inet_ntop(AF_INET6, &v6.sin6_addr, host, sizeof host);
  return absl::StrCat("%5B", host, "%5D:", ntohs(v6.sin6_port));
}

uint64_t CookieOf(int fd) {
  uint64_t cookie = 0;
  socklen_t length = sizeof cookie;
  return getsockopt(fd, SOL_SOCKET, SO_COOKIE, &cookie, &length) == 0 ? cookie : 0;
}

std::optional<uint64_t> BytesRead(int fd) {
  tcp_info info{};
  socklen_t length = sizeof info;
  int unread = 0;
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return std::nullopt;
  if (ioctl(fd, FIONREAD, &unread) != 0) return std::nullopt;  // a socket that listens
  const auto waiting = static_cast<uint64_t>(unread);
  return info.tcpi_bytes_received - std::min<uint64_t>(info.tcpi_bytes_received, waiting);
}

bool EndConnection(int fd, uint64_t cookie) {
  const int own = dup(fd);  // nobody else closes this descriptor
  if (own < 0) return false;
  const bool is_same = CookieOf(own) == cookie;
  if (is_same) {
    shutdown(own, SHUT_RDWR);
    constexpr size_t kAtOnce = size_t{1} << 20;
    // For TCP, MSG_TRUNC drops data instead of copying them.
    while (recv(own, nullptr, kAtOnce, MSG_DONTWAIT | MSG_TRUNC) > 0) {
    }
  }
  close(own);
  return is_same;
}

}  // namespace thalweg
