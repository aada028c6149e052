// ShardServer serves one Shard to the network: Control and Exchange of proto/thalweg/v1.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "core/base/clock.h"
#include "core/exchange/served_shard.h"
#include "server/base/metrics.h"
#include "server/net/tls_files.h"

namespace thalweg {

class Pollers;

// A ShardServer is thread-safe. It checks what arrives before the shard sees it. A node that sends
// malformed data fails its job with InvalidArgument; a node whose stream breaks fails it with
// Unavailable (through Member::Leave). The shard gets only identities that are proved: a stranger
// who names one without its secret gets PermissionDenied, on a stream too, and disturbs nobody
// else.
//
//   auto server = ShardServer::Start({.listen = "0.0.0.0:7070"}, shard, metrics);
//   …
//   (*server)->Stop(std::chrono::seconds(5));
class ShardServer {
 public:
  struct Options {
    std::string listen = "";  // host:port; port 0 takes a free one
    uint32_t threads = 1;     // ≥ 1; they receive, fold and send
    TlsFiles tls = {};        // with files: mutual TLS
    // A node that proves its job's secret must join within this time after asking for a challenge.
    Duration challenge_lifetime = std::chrono::seconds(30);
    // At most this many Joins wait for other nodes at a time, in all jobs together. Further ones
    // get ResourceExhausted.
    uint32_t max_waiting_joins = 1024;
    // What has arrived and is still held may take about this many bytes. Beyond it, gRPC resets
    // streams, new ones or old ones. It also bounds the number of connections. 0: no limit.
    uint64_t memory_bytes = 0;
    // Connections get descriptors below this, and others are closed at once. 0: three quarters of
    // what the process may have, and 16384 at most.
    uint32_t max_descriptor = 0;
    // A peer loses a stream or call if it accepts no data on it for this time, or a stream if it
    // does not say in this time for which node it has opened it.
    Duration patience = std::chrono::seconds(30);
    // A connection that has no call or stream for this time is closed. gRPC's clients connect again
    // with their next call.
    Duration idle = std::chrono::minutes(10);
  };

  // Starts a server. `shard` and `metrics` must outlive it. Returns Unavailable when the address
  // cannot be bound. From then on, gRPC's own messages go to our log.
  static absl::StatusOr<std::unique_ptr<ShardServer>> Start(const Options& options,
                                                            ServedShard& shard,
                                                            MetricRegistry& metrics);
  // Stops without a grace period.
  virtual ~ShardServer() = default;

  // Returns host:port with the port that is actually bound.
  virtual std::string address() const = 0;
  // Returns the threads that serve the shard, for this process's own calls to other shards too:
  // gRPC hands events from one queue's thread to another's, so a second set of threads costs CPU
  // time. Whoever has them must let go of them before Stop.
  virtual std::shared_ptr<Pollers> pollers() = 0;

  // Ends every stream with Unavailable, lets calls in progress run for `grace` and cancels the
  // rest; nodes whose Join is cancelled leave. Afterwards the shard is not called any more. Stop is
  // idempotent.
  virtual void Stop(Duration grace) = 0;
};

}  // namespace thalweg
