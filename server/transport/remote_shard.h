// A shard on another machine, as a node calls it: the client side of proto/thalweg/v1.
#pragma once

#include <memory>
#include <string>

#include "core/base/exchange.h"
#include "core/base/metrics.h"

namespace thalweg {

// Thread-safe. One TCP connection of its own. Every call has a deadline; errors name the address.
//
// Beyond Shard's contract:
// - Join waits for a connection until its deadline, so nodes may start before the aggregator. If
// there is
//   still none, Unavailable says which shard and address, and what the last attempt met.
// - Attach does not wait for the shard's answer: when it refuses, the sink's OnFailed says so.
// - A connection that breaks makes OnFailed(Unavailable), unless the node has left.
// - After Leave begins no new call to the sink is made; one in progress may still end.
// - Leave takes 4 s at most, also when the shard does not answer.
// - Leave and the destructor must not be called from the sink, nor from its destructor.
class RemoteShard : public Shard {
 public:
  // Connects at the first call. `address` is host:port; `metrics` must outlive the shard.
  static std::unique_ptr<RemoteShard> Create(const std::string& address, MetricRegistry& metrics);

  // Breaks streams that have not been left; the aggregator then takes their nodes for lost.
  ~RemoteShard() override = default;
};

}  // namespace thalweg
