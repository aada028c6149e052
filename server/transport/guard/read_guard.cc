#include "server/transport/guard/read_guard.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

#include "grpcpp/alarm.h"
#include "server/net/connections.h"
#include "spdlog/spdlog.h"

namespace thalweg {
namespace {

// The pollers are looked at so often.
constexpr Duration kInterval = std::chrono::milliseconds(20);
// A poller that has used less of its processor's time is not given an event: it may be idle.
constexpr Duration kIdleTime = std::chrono::milliseconds(1);
// When the guard is destroyed, it looks so often.
constexpr Duration kLastInterval = std::chrono::milliseconds(1);

}  // namespace

// A Watched is an event of a poller's queue.
class ReadGuard::Watched final : public Completion {
 public:
  explicit Watched(Poller& poller) : poller_(poller) {}

  // Gives the poller an event unless it has one, or has hardly done anything since the last one.
  void Ask() {
    if (is_waiting()) return;
    const Duration used = poller_.ProcessorTime();
    if (used - used_ < kIdleTime) return;
    handled_ = poller_.handled();
    used_ = used;
    is_waiting_.store(true, std::memory_order_relaxed);
    alarm_.Set(&poller_.queue(), std::chrono::system_clock::now(), Tag());
  }
  // Returns whether the poller has used `busy_time` without handling this or another event, and is
  // not working on one.
  bool IsStuck(Duration busy_time) {
    if (!is_waiting()) return false;
    // The time is read before the number, so that a delay between them cannot look like work.
    const Duration used = poller_.ProcessorTime();
    const bool is_working = poller_.is_working();
    if (const uint64_t handled = poller_.handled(); is_working || handled != handled_) {
      handled_ = handled;
      used_ = poller_.ProcessorTime();
      return false;
    }
    return used - used_ >= busy_time;
  }
  bool is_waiting() const { return is_waiting_.load(std::memory_order_acquire); }

  // Called on the poller's thread.
  void Happened(bool /*ok*/) override { is_waiting_.store(false, std::memory_order_release); }

 private:
  Poller& poller_;
  grpc::Alarm alarm_;
  uint64_t handled_ = 0;
  Duration used_{};
  std::atomic<bool> is_waiting_{false};
};

ReadGuard::ReadGuard(const Options& options, Pollers& pollers, Counter& closed)
    : options_(options), closed_(closed) {
  for (const auto& poller : pollers.all()) watched_.push_back(std::make_unique<Watched>(*poller));
  thread_ = Thread("read-guard", [this] { Loop(); });
}

ReadGuard::~ReadGuard() {
  {
    MutexLock lock(mutex_);
    is_stopped_ = true;
    changed_.NotifyAll();
  }
  thread_.Join();
}

bool ReadGuard::Wait() {
  MutexLock lock(mutex_);
  if (is_stopped_) {
    changed_.WaitUntil(mutex_, Now() + kLastInterval, [] { return false; });
    return true;
  }
  return changed_.WaitUntil(mutex_, Now() + kInterval,
                            [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return is_stopped_; });
}

void ReadGuard::Loop() {
  bool is_waiting = true;
  for (bool stop = false; !stop || is_waiting; stop = Wait()) {
    is_waiting = false;
    bool is_stuck = false;
    for (const auto& watched : watched_) {
      is_stuck |= watched->IsStuck(options_.busy_time);
      if (!stop) watched->Ask();
      is_waiting |= watched->is_waiting();
    }
    if (is_stuck) {
      ReadSoFar read = ReadFromAll(options_);
      CloseBusiest(read);
      read_ = std::move(read);
    } else {
      read_.clear();
    }
  }
}

ReadGuard::ReadSoFar ReadGuard::ReadFromAll(const Options& options) {
  ReadSoFar read;
  for (int fd = 0; fd < static_cast<int>(options.max_descriptor); ++fd) {
    if (LocalPort(fd) != options.port) continue;
    // If the descriptor changes hands in between, the cookie is wrong, and nothing is closed.
    const uint64_t cookie = CookieOf(fd);
    if (const std::optional<uint64_t> bytes = BytesRead(fd)) read[fd] = {cookie, *bytes};
  }
  return read;
}

void ReadGuard::CloseBusiest(const ReadSoFar& read) {
  int busiest = -1;
  uint64_t most = 0;
  for (const auto& [fd, now] : read) {
    const auto before = read_.find(fd);
    if (before == read_.end() || before->second.cookie != now.cookie) continue;
    if (const uint64_t added = now.bytes - before->second.bytes; added > most) {
      most = added;
      busiest = fd;
    }
  }
  // What a closed connection has sent before may still be read.
  if (busiest < 0 || read.at(busiest).cookie == ended_) return;
  const std::string peer = PeerOf(busiest);
  if (!EndConnection(busiest, read.at(busiest).cookie)) return;
  ended_ = read.at(busiest).cookie;
  closed_.Add(1);
  if (log_.Admits(Now())) {
    spdlog::warn(
        "closed a connection from {}: it kept a thread busy for {} ms with what is no "
        "message (docs/security.md)",
        peer, ToNanos(options_.busy_time) / 1'000'000);
  }
}

}  // namespace thalweg
