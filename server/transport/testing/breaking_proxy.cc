#include "server/transport/testing/breaking_proxy.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"

namespace thalweg {
namespace {

sockaddr_in Loopback(uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  return address;
}

// Closes the socket so that the peer gets a reset.
void CloseWithReset(int socket) {
  const linger at_once{1, 0};
  setsockopt(socket, SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
  close(socket);
}

bool SendAll(int socket, const char* bytes, size_t size) {
  while (size > 0) {
    const ssize_t sent = send(socket, bytes, size, MSG_NOSIGNAL);
    if (sent <= 0) return false;
    bytes += sent;
    size -= static_cast<size_t>(sent);
  }
  return true;
}

}  // namespace

BreakingProxy::BreakingProxy(uint16_t target_port, Budget budget)
    : target_port_(target_port), budget_(std::move(budget)) {
  listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = Loopback(0);
  socklen_t size = sizeof(address);
  // A failure shows as a connection that is refused.
  if (bind(listener_, reinterpret_cast<sockaddr*>(&address), size) == 0 &&
      listen(listener_, 64) == 0 &&
      getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size) == 0 &&
      pipe(wake_) == 0) {
    port_ = ntohs(address.sin_port);
  }
  thread_ = std::make_unique<Thread>("proxy", [this] { Loop(); });
}

BreakingProxy::~BreakingProxy() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
  }
  (void)!write(wake_[1], "x", 1);
  thread_.reset();
  for (Pair& pair : pairs_) Reset(pair);
  for (const int fd : {listener_, wake_[0], wake_[1]}) close(fd);
}

std::string BreakingProxy::address() const { return absl::StrCat("127.0.0.1:", port_); }

void BreakingProxy::Break() {
  {
    MutexLock lock(mutex_);
    break_all_ = true;
  }
  (void)!write(wake_[1], "x", 1);
  MutexLock lock(mutex_);
  changed_.WaitUntil(mutex_, kUntilStopped,
                     [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !break_all_; });
}

void BreakingProxy::SetOpen(bool is_open) {
  MutexLock lock(mutex_);
  is_open_ = is_open;
}

int BreakingProxy::breaks() const {
  MutexLock lock(mutex_);
  return breaks_;
}

void BreakingProxy::Loop() {
  while (true) {
    std::vector<pollfd> waiting = {{listener_, POLLIN, 0}, {wake_[0], POLLIN, 0}};
    for (const Pair& pair : pairs_) {
      for (const int end : pair.ends) waiting.push_back({end, POLLIN, 0});
    }
    poll(waiting.data(), waiting.size(), -1);
    bool break_all;
    {
      MutexLock lock(mutex_);
      if (stopping_) return;
      break_all = break_all_;
    }
    std::array<char, 16> ignored;
    if (waiting[1].revents != 0) (void)!read(wake_[0], ignored.data(), ignored.size());
    for (size_t i = 0; i < pairs_.size(); ++i) {
      bool is_over = break_all;
      for (int end = 0; end < 2 && !is_over; ++end) {
        if (waiting[2 + 2 * i + end].revents != 0) is_over = !Forward(pairs_[i], end);
      }
      if (is_over) Reset(pairs_[i]);
    }
    std::erase_if(pairs_, [](const Pair& pair) { return pair.ends[0] < 0; });
    if (break_all) {
      MutexLock lock(mutex_);
      break_all_ = false;
      changed_.NotifyAll();
    }
    if (waiting[0].revents != 0) AcceptOne();
  }
}

void BreakingProxy::AcceptOne() {
  Pair pair;
  pair.ends[0] = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
  pair.ends[1] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  pair.budget = budget_ ? budget_() : std::numeric_limits<uint64_t>::max();
  bool is_open;
  {
    MutexLock lock(mutex_);
    is_open = is_open_;
  }
  const sockaddr_in target = Loopback(target_port_);
  if (is_open &&
      connect(pair.ends[1], reinterpret_cast<const sockaddr*>(&target), sizeof(target)) == 0) {
    pairs_.push_back(pair);
  } else {
    Reset(pair);
  }
}

bool BreakingProxy::Forward(Pair& pair, int from) {
  std::array<char, 64 << 10> bytes;
  const ssize_t size = recv(pair.ends[from], bytes.data(), bytes.size(), 0);
  if (size <= 0) return false;
  const auto part = std::min<uint64_t>(static_cast<uint64_t>(size), pair.budget);
  pair.budget -= part;
  return SendAll(pair.ends[1 - from], bytes.data(), part) && pair.budget > 0;
}

void BreakingProxy::Reset(Pair& pair) {
  for (int& end : pair.ends) CloseWithReset(std::exchange(end, -1));
  MutexLock lock(mutex_);
  ++breaks_;
}

}  // namespace thalweg
