// A shard on another machine, as a node calls it: the client side of proto/thalweg/v1.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "core/base/exchange.h"
#include "core/base/metrics.h"
#include "server/net/tls_files.h"

namespace thalweg {

// The threads that wait for what remote shards send; connections take turns in being served by
// them.
class ClientPollers;
std::shared_ptr<ClientPollers> MakeClientPollers(uint32_t threads);  // ≥ 1

// Thread-safe. Has one or more TCP connections of its own; a chunk's contribution and its result
// travel on the connection that its number chooses. Every call has a deadline; errors name the
// address.
//
// Beyond Shard's contract:
// - MeasureLink and Join wait for a connection until their deadline, so nodes may start before the
//   aggregator. If there is still none, Unavailable says which shard and address, and what the last
//   attempt met.
// - Attach does not wait for the shard's answer: when it refuses, the sink's OnFailed says so.
// - A connection that breaks makes OnFailed(Unavailable), unless the node has left.
// - After Leave begins no new call to the sink is made; one in progress may still end.
// - Leave takes 4 s at most, also when the shard does not answer.
// - Leave and the destructor must not be called from the sink, nor from its destructor; the sink is
//   called by the pollers.
class RemoteShard : public Shard {
 public:
  struct Options {
    // TCP connections to the shard, 16 at most. 0: as many as the rate in JoinRequest::link asks
    // for, that is 1 below 600 MB/s and else 2.
    uint32_t channels = 0;
    // Shared by all remote shards of a process. Null: a thread of its own.
    std::shared_ptr<ClientPollers> pollers = nullptr;
    // With files: mutual TLS, where the shard's certificate must name the host in `address`.
    TlsFiles tls = {};
  };

  // Connects at the first call. `address` is host:port; `metrics` must outlive the shard.
  static std::unique_ptr<RemoteShard> Create(const std::string& address, const Options& options,
                                             MetricRegistry& metrics);

  // Breaks streams that have not been left; the aggregator then takes their nodes for lost.
  ~RemoteShard() override = default;
};

}  // namespace thalweg
