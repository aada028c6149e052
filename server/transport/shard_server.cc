#include "server/transport/shard_server.h"

#include <atomic>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "grpcpp/grpcpp.h"
#include "grpcpp/health_check_service_interface.h"
#include "server/transport/address.h"
#include "server/transport/channel_options.h"
#include "server/transport/control_service.h"
#include "server/transport/server_stream.h"
#include "spdlog/spdlog.h"
#include "thalweg/v1/exchange.grpc.pb.h"

namespace thalweg {
namespace {

// What cancelled streams need to end: no network is involved any more.
constexpr Duration kCancelTime = std::chrono::seconds(10);

class ExchangeService final
    : public v1::Exchange::WithRawCallbackMethod_Stream<v1::Exchange::Service> {
 public:
  ExchangeService(Shard& shard, MetricRegistry& metrics)
      : shard_(shard), counters_(StreamCounters::In(metrics, "server")) {}

  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Stream(
      grpc::CallbackServerContext* /*context*/) override {
    auto stream = std::make_shared<ServerStream>(shard_, streams_, counters_);
    // The set's reference is what keeps the stream while gRPC uses it, until OnDone.
    streams_.Add(stream);
    return stream.get();
  }

  StreamSet& streams() { return streams_; }

 private:
  Shard& shard_;
  const StreamCounters counters_;
  StreamSet streams_;
};

class GrpcShardServer final : public ShardServer {
 public:
  GrpcShardServer(Shard& shard, MetricRegistry& metrics)
      : control_(shard), exchange_(shard, metrics) {}
  ~GrpcShardServer() override { Stop(Duration::zero()); }

  absl::Status Listen(const std::string& listen) {
    THALWEG_ASSIGN_OR_RETURN(address_, ParseHostPort(listen));
    grpc::EnableDefaultHealthCheckService(true);
    grpc::ServerBuilder builder;
    ApplyServerArguments(builder);
    int port = 0;
    builder.AddListeningPort(ToString(address_), grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(&control_);
    builder.RegisterService(&exchange_);
    server_ = builder.BuildAndStart();
    if (server_ == nullptr || port == 0) {
      return absl::UnavailableError(absl::StrCat("cannot listen on ", ToString(address_),
                                                 ": is the port taken, or the host not ours?"));
    }
    address_.port = port;
    return absl::OkStatus();
  }

  std::string address() const override { return ToString(address_); }

  void Stop(Duration grace) override {
    if (server_ == nullptr || stopped_.exchange(true)) return;
    server_->GetHealthCheckService()->SetServingStatus(false);
    StreamSet& streams = exchange_.streams();
    streams.Shutdown(
        absl::UnavailableError(absl::StrCat("aggregator at ", address(), " is stopping")));
    server_->Shutdown(ToSystemTime(Now() + grace));
    if (!streams.WaitEmpty(Now() + kCancelTime)) {
      spdlog::error("aggregator at {}: streams have not ended after they were cancelled",
                    address());
    }
  }

 private:
  HostPort address_;
  ControlService control_;
  ExchangeService exchange_;
  std::unique_ptr<grpc::Server> server_;
  std::atomic<bool> stopped_{false};
};

}  // namespace

absl::StatusOr<std::unique_ptr<ShardServer>> ShardServer::Start(const Options& options,
                                                                Shard& shard,
                                                                MetricRegistry& metrics) {
  auto server = std::make_unique<GrpcShardServer>(shard, metrics);
  THALWEG_RETURN_IF_ERROR(server->Listen(options.listen));
  return server;
}

}  // namespace thalweg
