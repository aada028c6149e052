// RemoteShard is a shard on another machine as a node calls it: the client side of
// proto/thalweg/v1.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "core/exchange/shard.h"
#include "server/base/metrics.h"
#include "server/net/tls_files.h"

namespace thalweg {

// Pollers are the threads that wait for messages from remote shards; connections take turns among
// them. `threads` must be at least 1. A process that serves a shard uses its server's pollers for
// both (ShardServer::pollers).
class Pollers;
std::shared_ptr<Pollers> MakePollers(uint32_t threads);

// A RemoteShard is thread-safe. It owns one or more TCP connections; the number of a chunk selects
// the connection of its contribution and its result. Every call has a deadline, and errors name the
// address.
//
// A RemoteShard and its members add to the contracts of Shard and Member:
// - MeasureLink and Join wait for a connection until their deadline, so nodes may start before the
//   aggregator. If there is still none, Unavailable names the shard and the address, and says how
//   the last attempt failed.
// - Join proves the request's identity with its signer. Without one the shard refuses any identity.
// - Join does not wait for its streams: OnFailed reports that the shard refuses them.
// - A broken connection causes OnFailed(Unavailable), unless the node has left or Options::grace
//   lets it come back in time. Calls other than MeasureLink and Join are repeated for as long.
// - Once Leave has begun, no new event starts; one in progress may still end.
// - Leave takes 4 s at most, also when the shard does not answer.
// - Neither events nor their destructor may call Leave or a destructor, because the pollers call
//   them.
class RemoteShard : public Shard {
 public:
  struct Options {
    // The number of TCP connections to the shard, 16 at most. With 0 it follows from the rate in
    // JoinRequest::link: 1 below 600 MB/s, otherwise 2.
    uint32_t channels = 0;
    // All remote shards of a process may share these pollers. With null, the shard starts its own
    // thread.
    std::shared_ptr<Pollers> pollers = nullptr;
    // With files, the connection uses mutual TLS and the shard's certificate must name the host in
    // `address`.
    TlsFiles tls = {};
    // A connection that breaks is opened again for this long, and nothing is lost. With 0 it is
    // not. The shard learns it in Join.
    Duration grace{};
  };

  // Returns a shard that connects at the first call. `address` is host:port; `metrics` must outlive
  // the shard.
  static std::unique_ptr<RemoteShard> Create(const std::string& address, const Options& options,
                                             MetricRegistry& metrics);
};

}  // namespace thalweg
