#include "server/http/doorkeeper.h"

#include <sys/socket.h>

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "server/net/connections.h"

namespace thalweg {
namespace {

constexpr Duration kInterval = std::chrono::milliseconds(20);

bool IsListening(int fd) {
  int listens = 0;
  socklen_t length = sizeof listens;
  return getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &length) == 0 && listens != 0;
}

// Returns the descriptors of the process that are connections to the port.
std::vector<int> ConnectionsOf(int port) {
  std::vector<int> connections;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", error)) {
    int fd = -1;
    if (!absl::SimpleAtoi(entry.path().filename().string(), &fd)) continue;
    if (LocalPort(fd) == port && !IsListening(fd)) connections.push_back(fd);
  }
  return connections;
}

}  // namespace

Doorkeeper::Doorkeeper(const Options& options, Counter& ended)
    : options_(options), ended_(ended), thread_("http-door", [this] { Loop(); }) {}

Doorkeeper::~Doorkeeper() {
  MutexLock lock(mutex_);
  is_stopped_ = true;
  changed_.NotifyAll();
}

void Doorkeeper::Loop() {
  MutexLock lock(mutex_);
  while (!changed_.WaitUntil(mutex_, Now() + kInterval,
                             [this]()
                                 ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return is_stopped_; })) {
    if (open_ > 0) {
      Look(Now());
    } else {
      visits_.clear();
    }
  }
}

void Doorkeeper::Look(TimePoint now) {
  std::unordered_map<uint64_t, Visit> open;
  for (const int fd : ConnectionsOf(options_.port)) {
    const uint64_t cookie = CookieOf(fd);
    const auto known = visits_.find(cookie);
    open[cookie] = {fd, known == visits_.end() ? now : known->second.seen};
  }
  visits_ = std::move(open);
  std::vector<std::pair<uint64_t, Visit>> oldest_first(visits_.begin(), visits_.end());
  std::sort(oldest_first.begin(), oldest_first.end(), [](const auto& a, const auto& b) {
    return std::pair(a.second.seen, a.first) < std::pair(b.second.seen, b.first);
  });
  size_t left = oldest_first.size();
  for (const auto& [cookie, visit] : oldest_first) {
    if (left <= options_.most && now - visit.seen < options_.patience) break;
    if (EndConnection(visit.fd, cookie)) ended_.Add(1);
    --left;
  }
}

}  // namespace thalweg
