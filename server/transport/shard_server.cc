#include "server/transport/shard_server.h"

#include <algorithm>
#include <atomic>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "grpcpp/grpcpp.h"
#include "grpcpp/resource_quota.h"
#include "server/net/address.h"
#include "server/transport/channel_options.h"
#include "server/transport/control_service.h"
#include "server/transport/credentials.h"
#include "server/transport/grpc_log.h"
#include "server/transport/poller.h"
#include "server/transport/server_stream.h"
#include "spdlog/spdlog.h"
#include "thalweg/v1/exchange.grpc.pb.h"

namespace thalweg {
namespace {

// Streams get this time to tell their nodes that the server is stopping: gRPC then cancels what is
// unsent, and a cancelled stream carries no reason. A node that does not read must not delay the
// server.
constexpr Duration kGoodbyeTime = std::chrono::seconds(1);

// Besides the Joins that wait, this many control calls run at a time; gRPC refuses more of them
// with RESOURCE_EXHAUSTED. They take no longer than a lock, so that a few threads serve many nodes.
constexpr uint32_t kCallThreads = 256;

// Cancelled streams end within this time: the network is no longer involved.
constexpr Duration kCancelTime = std::chrono::seconds(10);

class GrpcShardServer final : public ShardServer {
 public:
  GrpcShardServer(Shard& shard, const Options& options, MetricRegistry& metrics)
      : control_(shard, options.challenge_lifetime, options.max_waiting_joins),
        nodes_(shard, StreamCounters::In(metrics, "server")) {}
  ~GrpcShardServer() override { Stop(Duration::zero()); }

  absl::Status Listen(const Options& options) {
    THALWEG_ASSIGN_OR_RETURN(address_, ParseHostPort(options.listen));
    grpc::ServerBuilder builder;
    ApplyServerArguments(builder);
    grpc::ResourceQuota quota;
    quota.SetMaxThreads(static_cast<int>(options.max_waiting_joins + kCallThreads));
    if (options.memory_bytes > 0) quota.Resize(options.memory_bytes);
    builder.SetResourceQuota(quota);
    int port = 0;
    builder.AddListeningPort(ToString(address_), MakeServerCredentials(options.tls), &port);
    builder.RegisterService(&control_);
    builder.RegisterService(&exchange_);
    // When queues are polled by our threads, gRPC's threads for the control calls do not poll.
    std::vector<std::unique_ptr<grpc::CompletionQueue>> queues;
    std::vector<grpc::ServerCompletionQueue*> accepting;
    for (uint32_t i = 0; i < options.threads; ++i) {
      auto queue = builder.AddCompletionQueue();
      accepting.push_back(queue.get());
      queues.push_back(std::move(queue));
    }
    server_ = builder.BuildAndStart();
    if (server_ == nullptr || port == 0) {
      return absl::UnavailableError(absl::StrCat("cannot listen on ", ToString(address_),
                                                 ": is the port taken, or the host not ours?"));
    }
    address_.port = port;
    for (auto* queue : accepting) ServerStream::Accept(exchange_, *queue, nodes_, streams_);
    pollers_ = std::make_shared<Pollers>(std::move(queues));
    return absl::OkStatus();
  }

  std::string address() const override { return ToString(address_); }
  std::shared_ptr<Pollers> pollers() override { return pollers_; }

  void Stop(Duration grace) override {
    if (server_ == nullptr || stopped_.exchange(true)) return;
    streams_.Shutdown(
        absl::UnavailableError(absl::StrCat("aggregator at ", address(), " is stopping")));
    const TimePoint now = Now();
    streams_.WaitEmpty(now + std::max(grace, kGoodbyeTime));
    server_->Shutdown(ToSystemTime(now + grace));
    streams_.Close();
    if (!streams_.WaitEmpty(Now() + kCancelTime)) {
      spdlog::error("aggregator at {}: streams have not ended after they were cancelled",
                    address());
    }
    pollers_ = nullptr;
  }

 private:
  HostPort address_;
  ControlService control_;
  NodeTable nodes_;
  StreamSet streams_;
  ServerStream::Service exchange_;
  std::unique_ptr<grpc::Server> server_;
  std::shared_ptr<Pollers> pollers_;  // destroyed before server_
  std::atomic<bool> stopped_{false};
};

}  // namespace

absl::StatusOr<std::unique_ptr<ShardServer>> ShardServer::Start(const Options& options,
                                                                Shard& shard,
                                                                MetricRegistry& metrics) {
  RouteGrpcLog();
  auto server = std::make_unique<GrpcShardServer>(shard, options, metrics);
  THALWEG_RETURN_IF_ERROR(server->Listen(options));
  return server;
}

}  // namespace thalweg
