// Cluster is a whole cluster in one process: aggregators, sidecars and workers joined by real Unix
// sockets and shared memory. The sidecar calls the aggregator directly, without gRPC, so that
// ThreadSanitizer can check everything.
#pragma once

#include <stdlib.h>

#include <cstring>
#include <filesystem>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/core/session.h"
#include "server/aggregator/aggregator.h"
#include "server/base/metrics.h"
#include "server/sidecar/device/cpu_device.h"
#include "server/sidecar/sidecar.h"
#include "tests/integration/outcome.h"

namespace thalweg {

class Cluster {
 public:
  // A Wrap wraps a shard as one node sees it, to inject faults.
  using Wrap = std::function<std::unique_ptr<Shard>(Shard&)>;

  // Gpus returns a node's GPUs, by the node's number, or null.
  using Gpus = std::function<Device*(uint32_t)>;

  Cluster(uint32_t nodes, uint32_t workers_per_node, uint32_t shards, const Wrap& wrap = {},
          uint32_t window_chunks = 0, const Gpus& gpus = {}, TraceWriter* trace = nullptr,
          uint64_t memory_bytes = Aggregator::Options().memory_bytes)
      : workers_per_node_(workers_per_node) {
    char dir[] = "/tmp/thalweg-test-XXXXXX";
    dir_ = mkdtemp(dir);
    for (uint32_t k = 0; k < shards; ++k) {
      aggregators_.push_back(std::make_unique<Aggregator>(
          Aggregator::Options{.trace = trace, .memory_bytes = memory_bytes}, registry_));
    }
    for (uint32_t node = 0; node < nodes; ++node) {
      Sidecar::Options options{SocketPath(node), nullptr, &device_};
      options.window_chunks = window_chunks;
      options.trace = trace;
      if (gpus) options.gpus = gpus(node);
      std::vector<Shard*> shards;
      for (auto& aggregator : aggregators_) {
        if (wrap) wrapped_.push_back(wrap(*aggregator));
        shards.push_back(wrap ? wrapped_.back().get() : aggregator.get());
      }
      ShardDirectory::Options directory;
      directory.configured = std::move(shards);
      if (node < aggregators_.size()) {
        directory.hosted = {aggregators_[node].get(), absl::StrCat("shard", node),
                            [](const auto&, const auto&) { return std::shared_ptr<void>(); }};
      }
      directory.connect = [this](const std::string& address) {
        const size_t shard = std::stoul(address.substr(5));
        return std::shared_ptr<Shard>(std::shared_ptr<void>(), aggregators_[shard].get());
      };
      directories_.push_back(std::make_unique<ShardDirectory>(std::move(directory)));
      options.shards = directories_.back().get();
      auto sidecar = Sidecar::Start(options, registry_);
      if (!sidecar.ok()) std::abort();
      sidecars_.push_back(*std::move(sidecar));
    }
  }
  ~Cluster() {
    sidecars_.clear();
    std::filesystem::remove_all(dir_);
  }

  std::string SocketPath(uint32_t node) const { return absl::StrCat(dir_, "/", node, ".sock"); }
  uint32_t world_size() const {
    return static_cast<uint32_t>(sidecars_.size()) * workers_per_node_;
  }

  // The shards as if the first ones were in the sidecars, for SessionOptions.
  std::vector<ShardPlace> HostedPlaces() const {
    std::vector<ShardPlace> places;
    for (uint32_t k = 0; k < aggregators_.size(); ++k) {
      places.push_back({absl::StrCat("shard", k), k < sidecars_.size() ? k : kNoHost});
    }
    return places;
  }

  SessionOptions OptionsFor(uint32_t rank) const {
    SessionOptions o;
    o.node = rank / workers_per_node_;
    o.sidecar_path = SocketPath(o.node);
    o.job = "job";
    o.rank = rank;
    o.world_size = world_size();
    o.num_nodes = static_cast<uint32_t>(sidecars_.size());
    o.node_name = absl::StrCat("host", o.node);
    o.local_rank = rank % workers_per_node_;
    o.local_size = workers_per_node_;
    o.chunk_bytes = kMinChunkBytes;
    o.timeout = kTestPatience;
    return o;
  }

  // Connects all workers at once. `edit` may change a rank's options.
  std::vector<absl::StatusOr<std::unique_ptr<Session>>> ConnectAll(
      const std::function<void(SessionOptions&)>& edit = {}) {
    std::vector<std::future<absl::StatusOr<std::unique_ptr<Session>>>> pending;
    for (uint32_t rank = 0; rank < world_size(); ++rank) {
      SessionOptions options = OptionsFor(rank);
      if (edit) edit(options);
      pending.push_back(
          std::async(std::launch::async, [options] { return Session::Connect(options); }));
    }
    std::vector<absl::StatusOr<std::unique_ptr<Session>>> sessions;
    for (auto& session : pending) sessions.push_back(session.get());
    return sessions;
  }

  MetricRegistry& registry() { return registry_; }
  Sidecar& sidecar(uint32_t node) { return *sidecars_[node]; }
  Aggregator& aggregator(uint32_t shard) { return *aggregators_[shard]; }

 private:
  const uint32_t workers_per_node_;
  std::string dir_;
  MetricRegistry registry_;
  CpuDevice device_;
  std::vector<std::unique_ptr<Aggregator>> aggregators_;
  std::vector<std::unique_ptr<Shard>> wrapped_;
  std::vector<std::unique_ptr<ShardDirectory>> directories_;
  std::vector<std::unique_ptr<Sidecar>> sidecars_;
};

}  // namespace thalweg
