#include "server/bin/sidecar_shards.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/status_macros.h"
#include "server/bin/program.h"
#include "server/identity/job_key.h"
#include "server/net/address.h"
#include "server/shards/returning_shard.h"

namespace thalweg {

absl::StatusOr<std::unique_ptr<SidecarShards>> SidecarShards::Start(const Options& options,
                                                                    MetricRegistry& registry) {
  std::unique_ptr<SidecarShards> shards(new SidecarShards(options));
  THALWEG_ASSIGN_OR_RETURN(const std::vector<std::string> addresses,
                           ParseTargets(options.aggregators));
  const bool is_hosting = !options.listen.empty();
  ShardDirectory::Options directory;
  if (is_hosting || addresses.empty()) {
    shards->own_ =
        std::make_unique<Aggregator>(Aggregator::Options{.trace = options.trace,
                                                         .hosted_only = is_hosting,
                                                         .memory_bytes = options.memory_bytes,
                                                         .policy = options.policy},
                                     registry);
  }
  if (is_hosting) THALWEG_RETURN_IF_ERROR(shards->Listen(registry));
  const RemoteShard::Options remote{
      options.channels, is_hosting ? shards->server_->pollers() : MakePollers(options.threads),
      options.tls, options.reconnect};
  for (const std::string& address : addresses) {
    shards->configured_.push_back(RemoteShard::Create(address, remote, registry));
    directory.configured.push_back(shards->configured_.back().get());
  }
  if (addresses.empty()) directory.configured.push_back(shards->own_.get());
  directory.are_own = addresses.empty();
  directory.addresses = addresses;
  directory.connect = [remote, &registry](const std::string& address) -> std::shared_ptr<Shard> {
    return RemoteShard::Create(address, remote, registry);
  };
  if (is_hosting) {
    directory.hosted = {
        shards->own_.get(), shards->server_->address(),
        [own = shards->own_.get()](const std::string& job, const std::string& identity) {
          return std::shared_ptr<void>(own->Host(job, identity));
        }};
  }
  directory.make_signer =
      [](const std::string& secret) -> absl::StatusOr<std::shared_ptr<const JobSigner>> {
    return JobKey::FromHex(secret);
  };
  if (options.reconnect > Duration::zero()) {
    directory.make_returning = [patience = options.reconnect,
                                &registry](std::shared_ptr<Shard> shard) {
      return std::make_shared<ReturningShard>(std::move(shard), patience, registry);
    };
  }
  shards->directory_ = std::make_unique<ShardDirectory>(std::move(directory));
  return shards;
}

SidecarShards::~SidecarShards() {
  directory_.reset();
  configured_.clear();
  if (own_ != nullptr) own_->Stop(absl::UnavailableError("the sidecar is shutting down"));
  if (server_ != nullptr) server_->Stop(kStopGrace);
}

absl::Status SidecarShards::Listen(MetricRegistry& registry) {
  THALWEG_ASSIGN_OR_RETURN(const std::vector<HostPort> places, ParsePorts(options_.listen));
  const std::string& host = places[0].host;
  if (host == "0.0.0.0" || host == "::") {
    return absl::InvalidArgumentError(
        absl::StrCat("--shard-listen ", options_.listen,
                     ": expected the address at which other nodes reach this host, got ", host));
  }
  for (const HostPort& place : places) {
    auto server = ShardServer::Start({.listen = ToString(place),
                                      .threads = options_.threads,
                                      .tls = options_.tls,
                                      .memory_bytes = options_.memory_bytes},
                                     *own_, registry);
    if (server.ok()) {
      server_ = *std::move(server);
      return absl::OkStatus();
    }
    if (!absl::IsUnavailable(server.status())) return server.status();
  }
  return absl::UnavailableError(absl::StrCat(
      "cannot listen on ", options_.listen, " (--shard-listen) for a shard: ",
      places.size() == 1 ? "the port is taken" : "all these ports are taken",
      ", or the host is not ours. Where workers start the sidecar, THALWEG_SHARD_PORTS names the "
      "ports: give it more of them than the host runs jobs"));
}

std::string SidecarShards::Describe() const {
  std::string text = options_.aggregators.empty()
                         ? "an aggregator of its own"
                         : absl::StrCat("aggregators ", options_.aggregators);
  if (server_ != nullptr) absl::StrAppend(&text, ", serving a shard at ", server_->address());
  return text;
}

}  // namespace thalweg
