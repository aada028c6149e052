// SidecarShards are the shards that a sidecar program can give to its jobs.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "core/base/clock.h"
#include "core/base/trace.h"
#include "server/aggregator/aggregator.h"
#include "server/base/metrics.h"
#include "server/net/tls_files.h"
#include "server/sidecar/job/shard_directory.h"
#include "server/transport/node/remote_shard.h"
#include "server/transport/shard/shard_server.h"

namespace thalweg {

// Thread-safe. It outlives the sidecar that uses its directory.
class SidecarShards {
 public:
  struct Options {
    std::string aggregators;  // host:port of each, comma separated; empty: none
    // host:port, or host:first-last, at which other nodes can reach a shard of this process; empty:
    // it serves its own node only.
    std::string listen;
    uint32_t threads = 1;   // for the network, once in each direction
    uint32_t channels = 0;  // see RemoteShard::Options
    Duration reconnect{};   // RemoteShard::Options::grace, and ReturningShard's patience
    TlsFiles tls = {};
    TraceWriter* trace = nullptr;  // nothing is traced when null
    uint64_t memory_bytes = 0;     // see Aggregator::Options, also for the next
    PolicySource policy = nullptr;
  };
  // `registry` must outlive the object. InvalidArgument: `listen` is not such an address;
  // Unavailable: none of its ports is free.
  static absl::StatusOr<std::unique_ptr<SidecarShards>> Start(const Options& options,
                                                              MetricRegistry& registry);
  ~SidecarShards();

  ShardDirectory& directory() { return *directory_; }
  // This process's own shard; null: all shards are elsewhere.
  Aggregator* own() { return own_.get(); }
  // At which other nodes reach it; empty: at none.
  std::string address() const { return server_ == nullptr ? "" : server_->address(); }
  // Describes for the log where gradients are summed.
  std::string Describe() const;
  // Returns whether another node still takes part in a job on this process's shard.
  bool IsServing() { return server_ != nullptr && own_->num_jobs() > 0; }

 private:
  explicit SidecarShards(const Options& options) : options_(options) {}
  absl::Status Listen(MetricRegistry& registry);

  const Options options_;
  std::unique_ptr<Aggregator> own_;
  std::unique_ptr<ShardServer> server_;  // null: it serves nobody else
  std::vector<std::unique_ptr<Shard>> configured_;
  std::unique_ptr<ShardDirectory> directory_;
};

}  // namespace thalweg
