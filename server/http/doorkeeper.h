// A Doorkeeper ends the connections of an HTTP server that are too many, take too long or say too
// much, so that probes find a thread, and requests take little memory. The library answers each
// connection on a thread of its own, waits there for its bytes, and bounds the silence between
// them, but not their number, nor that of a request's lines.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "core/base/clock.h"
#include "core/base/mutex.h"
#include "core/base/thread.h"
#include "server/base/metrics.h"

namespace thalweg {

// A Doorkeeper is one thread, which looks at connections while there are any. Of those that are too
// many, the oldest are ended, and last of all those that wait for an answer: a probe's is young, or
// waits.
class Doorkeeper {
 public:
  struct Options {
    int port = 0;                                 // of the server
    size_t most = 16;                             // connections at a time
    Duration patience = std::chrono::seconds(5);  // for a request and its answer
    // A connection is ended once the server has read more bytes from it: headers have fewer.
    uint64_t most_bytes = 64 << 10;
    // No connection is ended for being one too many before it had so long to ask.
    Duration welcome = std::chrono::milliseconds(200);
  };

  // `ended` counts connections.
  Doorkeeper(const Options& options, Counter& ended);
  ~Doorkeeper();

  // The server calls these when it has accepted a connection, and when it has closed it.
  void Opened() {
    MutexLock lock(mutex_);
    if (++open_ == 1) changed_.NotifyAll();
  }
  void Closed() {
    MutexLock lock(mutex_);
    --open_;
  }

 private:
  // A Visit is a connection, while it is open.
  struct Visit {
    int fd;
    TimePoint seen;
    bool has_asked = false;
    bool has_ended = false;  // the library has not closed it yet
  };

  // Whether the connection has asked, when it was first seen, and its socket's cookie.
  using Leaving = std::tuple<bool, TimePoint, uint64_t>;

  void Loop();
  void Look(TimePoint now);
  // Returns all visits, those first that are to be ended first.
  std::vector<Leaving> InOrder() const;

  const Options options_;
  Counter& ended_;
  std::unordered_map<uint64_t, Visit> visits_;  // by the socket's cookie

  Mutex mutex_;
  CondVar changed_;
  size_t open_ ABSL_GUARDED_BY(mutex_) = 0;
  bool is_stopped_ ABSL_GUARDED_BY(mutex_) = false;
  Thread thread_;  // declared last, because it uses everything above
};

}  // namespace thalweg
