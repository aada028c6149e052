#include "server/net/connections.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstddef>

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

uint64_t CookieOf(int fd) {
  uint64_t cookie = 0;
  socklen_t length = sizeof cookie;
  return getsockopt(fd, SOL_SOCKET, SO_COOKIE, &cookie, &length) == 0 ? cookie : 0;
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
