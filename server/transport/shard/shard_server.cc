#include "server/transport/shard/shard_server.h"

#include <algorithm>
#include <atomic>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "grpcpp/grpcpp.h"
#include "grpcpp/resource_quota.h"
#include "server/net/address.h"
#include "server/net/connections.h"
#include "server/transport/channel_options.h"
#include "server/transport/credentials.h"
#include "server/transport/grpc_log.h"
#include "server/transport/guard/acceptor.h"
#include "server/transport/guard/authorizer.h"
#include "server/transport/guard/read_guard.h"
#include "server/transport/poller.h"
#include "server/transport/shard/control_service.h"
#include "server/transport/shard/server_stream.h"
#include "spdlog/spdlog.h"
#include "thalweg/v1/exchange.grpc.pb.h"

namespace thalweg {
namespace {

// Streams get this time to tell their nodes that the server is stopping: gRPC then cancels what is
// unsent, and a cancelled stream carries no reason. A node that does not read must not delay the
// server.
constexpr Duration kGoodbyeTime = std::chrono::seconds(1);

// gRPC's quota does not count what streams without a message take, about 17 KB each. A connection
// that does nothing else may take a MB; most take far less.
constexpr uint64_t kBytesOfConnection = 384 << 10;

constexpr Duration kWatchInterval = std::chrono::seconds(2);

class GrpcShardServer final : public ShardServer {
 public:
  GrpcShardServer(ServedShard& shard, const Options& options, MetricRegistry& metrics)
      : patience_(options.patience),
        refused_(metrics.GetCounter("thalweg_grpc_refused_connections_total",
                                    "Connections that were closed because too many were open")),
        guarded_(metrics.GetCounter(
            "thalweg_grpc_closed_connections_total",
            "Connections that were closed because they kept a thread busy without a message")),
        ended_(metrics.GetCounter(
            "thalweg_grpc_ended_connections_total",
            "Connections that were ended because they had more streams than the server allows")),
        handshakes_(metrics),
        authorizer_(metrics),
        nodes_(StreamCounters::In(metrics, "server")),
        control_(shard, authorizer_, nodes_, options.challenge_lifetime,
                 options.max_waiting_joins) {}
  ~GrpcShardServer() override { Stop(Duration::zero()); }

  absl::Status Listen(const Options& options) {
    THALWEG_ASSIGN_OR_RETURN(address_, ParseHostPort(options.listen));
    max_descriptor_ = options.max_descriptor > 0 ? options.max_descriptor : DefaultMaxDescriptor();
    Acceptor::Limits limits{.descriptor = max_descriptor_};
    if (options.memory_bytes > 0) limits.connections = options.memory_bytes / kBytesOfConnection;
    auto acceptor = Acceptor::Listen(&address_, limits, refused_);
    if (!acceptor.ok()) {
      return absl::UnavailableError(absl::StrCat("cannot listen on ", ToString(address_), " (",
                                                 acceptor.status().message(),
                                                 "): is the port taken, or the host not ours?"));
    }
    grpc::ServerBuilder builder;
    ApplyServerArguments(builder, options.idle);
    grpc::ResourceQuota quota;
    if (options.memory_bytes > 0) quota.Resize(options.memory_bytes);
    builder.SetResourceQuota(quota);
    connections_ = builder.experimental().AddExternalConnectionAcceptor(
        grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD,
        MakeServerCredentials(options.tls));
    // Both services are asynchronous, so that gRPC starts no threads to serve them.
    builder.RegisterService(&control_.service());
    builder.RegisterService(&exchange_);
    std::vector<std::unique_ptr<grpc::CompletionQueue>> queues;
    std::vector<grpc::ServerCompletionQueue*> accepting;
    for (uint32_t i = 0; i < options.threads; ++i) {
      auto queue = builder.AddCompletionQueue();
      accepting.push_back(queue.get());
      queues.push_back(std::move(queue));
    }
    server_ = builder.BuildAndStart();
    if (server_ == nullptr) {
      return absl::InternalError(absl::StrCat("cannot serve on ", ToString(address_)));
    }
    for (auto* queue : accepting) {
      ServerStream::Accept(exchange_, *queue, authorizer_, nodes_, streams_);
      control_.Accept(*queue);
    }
    pollers_ = std::make_shared<Pollers>(std::move(queues));
    guard_ = std::make_unique<ReadGuard>(
        ReadGuard::Options{.port = address_.port, .max_descriptor = max_descriptor_}, *pollers_,
        guarded_);
    watch_ = Thread("grpc-watch", [this] { Watch(); });
    acceptor_ = *std::move(acceptor);
    acceptor_->Start([this](int listener, int connection) {
      grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters parameters;
      parameters.listener_fd = listener;
      parameters.fd = connection;
      connections_->HandleNewConnection(&parameters);
    });
    return absl::OkStatus();
  }

  std::string address() const override { return ToString(address_); }
  std::shared_ptr<Pollers> pollers() override { return pollers_; }

  void Stop(Duration grace) override {
    if (server_ == nullptr || stopped_.exchange(true)) return;
    acceptor_ = nullptr;
    streams_.Shutdown(
        absl::UnavailableError(absl::StrCat("aggregator at ", address(), " is stopping")));
    const TimePoint now = Now();
    streams_.WaitEmpty(now + std::max(grace, kGoodbyeTime));
    server_->Shutdown(ToSystemTime(now + grace));
    streams_.Close();
    control_.calls().Close();
    const TimePoint give_up = Now() + kCancelTime;
    if (!streams_.WaitEmpty(give_up) || !control_.calls().WaitEmpty(give_up)) {
      spdlog::error("aggregator at {}: streams or calls have not ended after they were cancelled",
                    address());
    }
    nodes_.Close(absl::UnavailableError("its aggregator is stopping"));
    {
      MutexLock lock(mutex_);
      is_watching_ = false;
      changed_.NotifyAll();
    }
    watch_.Join();
    guard_ = nullptr;
    pollers_ = nullptr;
  }

 private:
  // Ends the connection of a peer, such as ipv4:10.0.0.1:70.
  void EndPeer(const std::string& peer) {
    const std::string end = peer.substr(peer.find(':') + 1);
    for (int fd = 0; fd < static_cast<int>(max_descriptor_); ++fd) {
      const uint64_t cookie = CookieOf(fd);
      if (cookie == 0 || LocalPort(fd) != address_.port || PeerOf(fd) != end) continue;
      if (EndConnection(fd, cookie)) ended_.Add(1);
      return;
    }
  }

  // Cuts off the peers that do not read, and ends memberships of nodes that are gone.
  void Watch() {
    const Duration interval = std::min<Duration>(patience_ / 4, kWatchInterval);
    MutexLock lock(mutex_);
    while (!changed_.WaitUntil(
        mutex_, Now() + interval,
        [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !is_watching_; })) {
      nodes_.Expire(Now());
      streams_.CutStalled(Now() - patience_);
      control_.calls().CutUnread(Now() - patience_);
    }
  }

  const Duration patience_;
  Counter& refused_;
  Counter& guarded_;
  Counter& ended_;
  uint32_t max_descriptor_ = 0;
  HostPort address_;
  HandshakeFailures handshakes_;
  Authorizer authorizer_;
  NodeTable nodes_;
  ControlService control_;
  StreamSet streams_{[this](const std::string& peer) { EndPeer(peer); }};
  ServerStream::Service exchange_;
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> connections_;
  std::unique_ptr<grpc::Server> server_;
  std::shared_ptr<Pollers> pollers_;  // destroyed before server_
  std::unique_ptr<ReadGuard> guard_;  // destroyed before pollers_
  std::unique_ptr<Acceptor> acceptor_;
  std::atomic<bool> stopped_{false};

  Mutex mutex_;
  CondVar changed_;
  bool is_watching_ ABSL_GUARDED_BY(mutex_) = true;
  Thread watch_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<ShardServer>> ShardServer::Start(const Options& options,
                                                                ServedShard& shard,
                                                                MetricRegistry& metrics) {
  RouteGrpcLog();
  auto server = std::make_unique<GrpcShardServer>(shard, options, metrics);
  THALWEG_RETURN_IF_ERROR(server->Listen(options));
  return server;
}

}  // namespace thalweg
