// Acceptor takes connections for a gRPC server and bounds their number. gRPC's own listener never
// accepts again once the process has run out of descriptors (CVE-2023-4785).
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "core/base/thread.h"
#include "server/base/fair_quota.h"
#include "server/base/log_limit.h"
#include "server/base/metrics.h"
#include "server/net/address.h"

namespace thalweg {

// A Socket owns a descriptor.
class Socket {
 public:
  explicit Socket(int fd = -1) : fd_(fd) {}
  Socket(Socket&& other) noexcept : fd_(other.Release()) {}
  Socket& operator=(Socket&& other) noexcept;
  ~Socket();

  int fd() const { return fd_; }
  int Release();

 private:
  int fd_;
};

// Connections get the lowest free descriptors, so that a bound for the descriptor bounds them, too.
// It leaves a quarter of what the process may open for everything else.
inline constexpr uint32_t kMaxConnectionDescriptor = 16'384;
uint32_t DefaultMaxDescriptor();

// An Acceptor is one thread. A connection whose descriptor is not below Limits::descriptor, or that
// is one too many, is closed at once; when the process has no descriptor left, connections wait.
class Acceptor {
 public:
  struct Limits {
    uint32_t descriptor = kMaxConnectionDescriptor;
    // That are open. Hosts share them (FairQuota); all addresses of an IPv6 /64 are one host.
    uint64_t connections = kMaxConnectionDescriptor;
  };
  // Takes the two descriptors, of which the caller owns the second: a listening socket, and a
  // connection that does not block. Called from the acceptor's thread.
  using Handler = std::function<void(int listener, int connection)>;

  // Listens on all addresses of the host and sets address->port to the port that is bound.
  // Returns Unavailable when it cannot. Nothing is accepted before Start.
  static absl::StatusOr<std::unique_ptr<Acceptor>> Listen(HostPort* address, const Limits& limits,
                                                          Counter& refused);
  // Stops accepting and closes the sockets that listen.
  ~Acceptor();

  void Start(Handler handler);

 private:
  struct Open {
    int fd;
    uint64_t cookie;
    std::string host;
  };

  Acceptor(std::vector<Socket> listeners, Socket stop, const Limits& limits, Counter& refused)
      : listeners_(std::move(listeners)),
        stop_(std::move(stop)),
        limits_(limits),
        places_(std::min<uint64_t>(limits.connections, limits.descriptor)),
        refused_(refused) {}

  void Loop();
  // Accepts what waits at one socket. Returns false when no descriptor is left.
  bool AcceptAll(int listener);
  // Returns whether there may be this connection too; looks which others have ended, if need be.
  bool HasRoom(int fd, const std::string& host);
  void LogRefused(const std::string& peer, const std::string& host) const;

  const std::vector<Socket> listeners_;
  const Socket stop_;  // an eventfd
  const Limits limits_;
  FairQuota places_;  // of open_
  Counter& refused_;
  LogLimit log_{"about connections that are refused"};
  Handler handler_;
  std::vector<Open> open_;  // connections, or some that have ended; only the thread uses it
  TimePoint looked_;        // when it was last seen which have
  Thread thread_;           // declared last, because it uses everything above
};

}  // namespace thalweg
