// Serves one Shard to the network: proto/thalweg/v1's Control and Exchange.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "core/base/clock.h"
#include "core/base/exchange.h"
#include "core/base/metrics.h"
#include "server/net/tls_files.h"

namespace thalweg {

// Thread-safe. What arrives is checked before the shard sees it; a node that sends anything
// malformed makes its job fail with InvalidArgument, one whose stream breaks makes it fail with
// Unavailable (through Shard::Leave).
//
//   auto server = ShardServer::Start({.listen = "0.0.0.0:7070"}, shard, metrics);
//   …
//   (*server)->Stop(std::chrono::seconds(5));
class ShardServer {
 public:
  struct Options {
    std::string listen;    // host:port; port 0 takes a free one
    uint32_t threads = 1;  // ≥ 1, that receive, fold and send
    TlsFiles tls = {};     // with files: mutual TLS
  };

  // `shard` and `metrics` must outlive the server. Unavailable when the address cannot be bound.
  static absl::StatusOr<std::unique_ptr<ShardServer>> Start(const Options& options, Shard& shard,
                                                            MetricRegistry& metrics);
  // Stops without grace.
  virtual ~ShardServer() = default;

  // host:port with the port really bound.
  virtual std::string address() const = 0;

  // Ends every stream with Unavailable, gives calls in progress `grace` to end and cancels the
  // rest. Afterwards the shard is not called any more. A Join in progress is waited for: make the
  // shard end its joins first, else this lasts until the callers' deadlines. Idempotent.
  virtual void Stop(Duration grace) = 0;
};

}  // namespace thalweg
