#include "server/transport/node/remote_shard.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/mutex.h"
#include "core/base/protocol.h"
#include "core/base/status_macros.h"
#include "grpcpp/grpcpp.h"
#include "server/base/printable.h"
#include "server/transport/channel_options.h"
#include "server/transport/credentials.h"
#include "server/transport/link_probe.h"
#include "server/transport/node/control_client.h"
#include "server/transport/node/remote_member.h"
#include "server/transport/node/shard_streams.h"
#include "server/transport/poller.h"
#include "server/transport/wire/control_codec.h"
#include "spdlog/spdlog.h"

namespace thalweg {
namespace {

// One connection carries at most this rate, because one thread handles its bytes at either end.
constexpr double kOneChannelBytesPerSecond = 600e6;
// Jobs that follow each other, as the memberships of an elastic training, need not measure again.
constexpr Duration kFresh = std::chrono::minutes(5);

class GrpcRemoteShard final : public RemoteShard {
 public:
  GrpcRemoteShard(const std::string& address, const Options& options, MetricRegistry& metrics)
      : address_(address),
        options_(options),
        counters_(StreamCounters::In(metrics, "client")),
        pollers_(options.pollers != nullptr ? options.pollers : MakePollers(1)),
        credentials_(MakeChannelCredentials(options.tls)),
        connections_{{Connect(), &pollers_->Next()}},
        control_(Named(absl::StrCat("aggregator at ", address)), connections_.front().channel) {}

  absl::StatusOr<LinkSpeed> MeasureLink(uint32_t num_nodes, TimePoint deadline,
                                        const std::stop_token& stop) override {
    {
      MutexLock lock(mutex_);
      if (num_nodes == measured_.num_nodes && Now() < measured_.at + kFresh) return measured_.speed;
    }
    absl::StatusOr<LinkSpeed> speed;
    THALWEG_RETURN_IF_ERROR(control_.WhenConnected(deadline, stop, [&] {
      speed = ProbeLink([&](size_t padding_bytes) { return Probe(padding_bytes, deadline, stop); });
      return speed.status();
    }));
    spdlog::debug("{}: {:.0f} MB/s, round trip {:.3f} ms", control_.name(),
                  speed->bytes_per_second / 1e6, ToSeconds(speed->round_trip) * 1e3);
    MutexLock lock(mutex_);
    measured_ = {num_nodes, Now(), *speed};
    return speed;
  }

  absl::StatusOr<std::unique_ptr<Member>> Join(const JoinRequest& of_node,
                                               std::shared_ptr<MemberEvents> events,
                                               TimePoint deadline) override {
    JoinRequest request = of_node;
    request.grace = options_.grace;
    const std::vector<ShardStreams::Connection> connections = OpenConnections(request.link);
    // Jobs number their shards each in its own way.
    auto control = std::make_unique<ControlClient>(
        Named(absl::StrCat("aggregator shard ", request.shard, " at ", address_)),
        connections.front().channel);
    v1::JoinResponse response;
    THALWEG_RETURN_IF_ERROR(control->WhenConnected(
        deadline, request.stop, [&] { return control->Join(request, &response, deadline); }));
    absl::StatusOr<Terms> terms = FromProto(response);
    if (!terms.ok()) return control->Named(terms.status());
    spdlog::debug("joined '{}' at {}, release {}", request.job, control->name(),
                  Printable(response.server_version(), kMaxNameBytes));
    const ShardStreams::Ticket ticket{response.token(), request.identity, request.signer};
    std::shared_ptr<ShardStreams> streams = ShardStreams::Open(
        {connections, control->name(), ticket, options_.grace}, std::move(events), counters_);
    return std::make_unique<RemoteMember>(std::move(control), ticket.token, *std::move(terms),
                                          std::move(streams));
  }

 private:
  struct Measurement {
    uint32_t num_nodes = 0;  // 0: there has been none
    TimePoint at;            // its end
    LinkSpeed speed;
  };

  ControlClient::Options Named(std::string name) const {
    return {std::move(name), options_.tls.enabled(), options_.grace};
  }

  absl::StatusOr<Duration> Probe(size_t padding_bytes, TimePoint deadline,
                                 const std::stop_token& stop) {
    v1::ProbeRequest request;
    request.mutable_padding()->resize(padding_bytes);
    v1::ProbeResponse response;
    const TimePoint begin = Now();
    THALWEG_RETURN_IF_ERROR(
        control_.Call(&v1::Control::Stub::Probe, request, &response, deadline, stop));
    return Now() - begin;
  }

  std::shared_ptr<grpc::Channel> Connect() const {
    return grpc::CreateCustomChannel(address_, credentials_, ClientArguments());
  }

  // Connects the channels that streams will use, so that they are ready when the shard answers.
  std::vector<ShardStreams::Connection> OpenConnections(const LinkSpeed& link) {
    const uint32_t wanted = options_.channels != 0                              ? options_.channels
                            : link.bytes_per_second < kOneChannelBytesPerSecond ? 1
                                                                                : 2;
    MutexLock lock(mutex_);
    while (connections_.size() < wanted) {
      connections_.push_back({Connect(), &pollers_->Next()});
      connections_.back().channel->GetState(/*try_to_connect=*/true);
    }
    return connections_;
  }

  const std::string address_;
  const Options options_;
  const StreamCounters counters_;
  const std::shared_ptr<Pollers> pollers_;
  const std::shared_ptr<grpc::ChannelCredentials> credentials_;

  Mutex mutex_;
  Measurement measured_ ABSL_GUARDED_BY(mutex_);
  // The control calls use the first one too.
  std::vector<ShardStreams::Connection> connections_ ABSL_GUARDED_BY(mutex_);
  ControlClient control_;  // of calls that belong to no job
};

}  // namespace

std::shared_ptr<Pollers> MakePollers(uint32_t threads) {
  return std::make_shared<Pollers>(threads);
}

std::unique_ptr<RemoteShard> RemoteShard::Create(const std::string& address, const Options& options,
                                                 MetricRegistry& metrics) {
  return std::make_unique<GrpcRemoteShard>(address, options, metrics);
}

}  // namespace thalweg
