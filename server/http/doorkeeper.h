// A Doorkeeper ends the connections of an HTTP server that are too many or take too long, so that
// probes find a thread. The library answers each connection on a thread of its own, waits there for
// its bytes, and bounds the silence between them, but not their number.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <unordered_map>

#include "core/base/clock.h"
#include "core/base/metrics.h"
#include "core/base/mutex.h"
#include "core/base/thread.h"

namespace thalweg {

// A Doorkeeper is one thread, which looks at connections while there are any. Of those that are too
// many, the oldest are ended: a probe's is young.
class Doorkeeper {
 public:
  struct Options {
    int port = 0;                                 // of the server
    size_t most = 16;                             // connections at a time
    Duration patience = std::chrono::seconds(5);  // for a request and its answer
  };

  // `ended` counts connections.
  Doorkeeper(const Options& options, Counter& ended);
  ~Doorkeeper();

  // The server calls these when it has accepted a connection, and when it has closed it.
  void Opened() { ++open_; }
  void Closed() { --open_; }

 private:
  // A Visit is a connection, while it is open.
  struct Visit {
    int fd;
    TimePoint seen;
  };

  void Loop();
  void Look(TimePoint now);

  const Options options_;
  Counter& ended_;
  std::atomic<size_t> open_{0};
  std::unordered_map<uint64_t, Visit> visits_;  // by the socket's cookie

  Mutex mutex_;
  CondVar changed_;
  bool is_stopped_ ABSL_GUARDED_BY(mutex_) = false;
  Thread thread_;  // declared last, because it uses everything above
};

}  // namespace thalweg
