#include "server/http/doorkeeper.h"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <string_view>
#include <system_error>

#include "absl/strings/numbers.h"
#include "server/net/connections.h"

namespace thalweg {
namespace {

constexpr Duration kInterval = std::chrono::milliseconds(20);  // while there are connections
constexpr Duration kIdleInterval = std::chrono::seconds(10);

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

// Whether a whole request has come that nobody has read: who sent it waits for a thread.
bool HasAsked(int fd) {
  std::array<char, 8 << 10> unread;  // headers may have as many bytes
  const ssize_t got = recv(fd, unread.data(), unread.size(), MSG_PEEK | MSG_DONTWAIT);
  return got > 0 && std::string_view(unread.data(), static_cast<size_t>(got)).find("\r\n\r\n") !=
                        std::string_view::npos;
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
  while (true) {
    {
      MutexLock lock(mutex_);
      changed_.WaitUntil(
          mutex_, Now() + kIdleInterval,
          [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return is_stopped_ || open_ > 0; });
      const auto is_stopped = [this]()
                                  ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return is_stopped_; };
      if (changed_.WaitUntil(mutex_, Now() + kInterval, is_stopped)) return;
      if (open_ == 0) {
        visits_.clear();
        continue;
      }
    }
    Look(Now());
  }
}

void Doorkeeper::Look(TimePoint now) {
  std::unordered_map<uint64_t, Visit> open;
  const std::vector<int> connections = ConnectionsOf(options_.port);
  const bool are_too_many = connections.size() > options_.most;
  for (const int fd : connections) {
    const uint64_t cookie = CookieOf(fd);
    const auto known = visits_.find(cookie);
    Visit& visit = open[cookie] = known == visits_.end() ? Visit{fd, now} : known->second;
    // Whoever was seen to wait may be about to get its answer.
    visit.has_asked = visit.has_asked || (are_too_many && HasAsked(fd));
  }
  visits_ = std::move(open);
  const std::vector<Leaving> order = InOrder();
  size_t left = order.size();
  for (const auto& [has_asked, seen, cookie] : order) {
    Visit& visit = visits_[cookie];
    const bool is_one_too_many = left > options_.most && now - seen >= options_.welcome;
    const bool says_too_much = BytesRead(visit.fd).value_or(0) > options_.most_bytes;
    if (!is_one_too_many && !says_too_much && now - seen < options_.patience) continue;
    --left;
    if (visit.has_ended) continue;
    visit.has_ended = true;
    if (EndConnection(visit.fd, cookie)) ended_.Add(1);
  }
}

std::vector<Doorkeeper::Leaving> Doorkeeper::InOrder() const {
  std::vector<Leaving> order;
  for (const auto& [cookie, visit] : visits_) {
    order.emplace_back(visit.has_asked, visit.seen, cookie);
  }
  std::sort(order.begin(), order.end());
  return order;
}

}  // namespace thalweg
