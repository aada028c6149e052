// A ReadGuard keeps one connection from holding a server's threads. gRPC 1.51 reads on for as long
// as a connection's data keep coming. A peer that opens and resets streams without end ("rapid
// reset", CVE-2023-44487) thereby keeps a poller from everybody else and fills the memory with
// streams that nobody takes (docs/adr/0030-control-calls-and-grpcs-version.md).
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "core/base/clock.h"
#include "core/base/mutex.h"
#include "core/base/thread.h"
#include "server/base/log_limit.h"
#include "server/base/metrics.h"
#include "server/transport/poller.h"

namespace thalweg {

// A ReadGuard is one thread. It gives each poller that is not idle an event now and then. A poller
// that uses
// `busy_time` of its processor's time, handles no event meanwhile and is not working on one
// (Poller::Working) is inside one connection; the connection that is read from most is closed. A
// poller that waits or is not scheduled uses no time, so a busy machine closes nothing.
class ReadGuard {
 public:
  struct Options {
    int port = 0;                 // of the server
    uint32_t max_descriptor = 0;  // of its connections
    Duration busy_time = std::chrono::milliseconds(50);
  };

  // The pollers must outlive the guard. `closed` counts connections.
  ReadGuard(const Options& options, Pollers& pollers, Counter& closed);
  // Waits until the pollers have handled what the guard gave them.
  ~ReadGuard();

 private:
  class Watched;

  // Waits until it is time to look again. Returns whether the guard is being destroyed.
  bool Wait();
  void Loop();
  // What has been read from a connection, and what tells it from others that have had, or will
  // have, its descriptor.
  struct Read {
    uint64_t cookie = 0;
    uint64_t bytes = 0;
  };
  using ReadSoFar = std::unordered_map<int, Read>;  // by descriptor

  static ReadSoFar ReadFromAll(const Options& options);
  // Closes the connection from which most has been read since `read_`, if anything has.
  void CloseBusiest(const ReadSoFar& read);

  const Options options_;
  Counter& closed_;
  std::vector<std::unique_ptr<Watched>> watched_;
  ReadSoFar read_;  // when a poller was inside a connection the last time that the thread looked
  uint64_t ended_ = 0;  // the cookie of the connection that was closed last
  LogLimit log_{"about connections that kept a thread busy"};

  Mutex mutex_;
  CondVar changed_;
  bool is_stopped_ ABSL_GUARDED_BY(mutex_) = false;
  Thread thread_;  // declared last, because it uses everything above
};

}  // namespace thalweg
