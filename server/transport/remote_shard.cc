#include "server/transport/remote_shard.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/printable.h"
#include "core/base/protocol.h"
#include "core/base/status_macros.h"
#include "grpcpp/grpcpp.h"
#include "server/transport/channel_options.h"
#include "server/transport/control_codec.h"
#include "server/transport/credentials.h"
#include "server/transport/link_probe.h"
#include "server/transport/poller.h"
#include "server/transport/proofs.h"
#include "server/transport/shard_streams.h"
#include "server/transport/status_codec.h"
#include "spdlog/spdlog.h"
#include "thalweg/v1/control.grpc.pb.h"

namespace thalweg {
namespace {

constexpr Duration kLeaveTime = std::chrono::seconds(2);
// A cancelled stream ends within this time: the network is no longer involved.
constexpr Duration kCancelTime = std::chrono::seconds(10);
// A call reserves this time to find out why there is no connection.
constexpr Duration kReasonTime = std::chrono::milliseconds(500);
// One connection carries at most this rate, because one thread handles its bytes at either end.
constexpr double kOneChannelBytesPerSecond = 600e6;

class GrpcRemoteShard final : public RemoteShard {
 public:
  GrpcRemoteShard(const std::string& address, const Options& options, MetricRegistry& metrics)
      : address_(address),
        options_(options),
        counters_(StreamCounters::In(metrics, "client")),
        pollers_(options.pollers != nullptr ? options.pollers : MakePollers(1)),
        credentials_(MakeChannelCredentials(options.tls)),
        channel_(Connect()),
        control_(v1::Control::NewStub(channel_)),
        peer_(absl::StrCat("aggregator at ", address)),
        connections_{{channel_, &pollers_->Next()}} {}

  ~GrpcRemoteShard() override {
    std::map<SessionToken, std::shared_ptr<ShardStreams>> streams;
    {
      MutexLock lock(mutex_);
      streams.swap(streams_);
    }
    for (auto& [token, stream] : streams) stream->Detach();
    for (auto& [token, stream] : streams) CancelAndWait(*stream);
  }

  absl::StatusOr<LinkSpeed> MeasureLink(TimePoint deadline) override {
    absl::StatusOr<LinkSpeed> speed;
    THALWEG_RETURN_IF_ERROR(CallConnected(deadline, [&] {
      speed = ProbeLink([&](size_t padding_bytes) { return Probe(padding_bytes, deadline); });
      return speed.status();
    }));
    spdlog::debug("{}: {:.0f} MB/s, round trip {:.3f} ms", peer(), speed->bytes_per_second / 1e6,
                  ToSeconds(speed->round_trip) * 1e3);
    return speed;
  }

  absl::StatusOr<Membership> Join(const JoinRequest& request, TimePoint deadline) override {
    {
      MutexLock lock(mutex_);
      peer_ = absl::StrCat("aggregator shard ", request.shard, " at ", address_);
    }
    OpenConnections(request.link);
    v1::JoinResponse response;
    THALWEG_RETURN_IF_ERROR(
        CallConnected(deadline, [&] { return ProveAndJoin(request, &response, deadline); }));
    absl::StatusOr<Membership> membership = FromProto(response);
    if (!membership.ok()) return Named(membership.status());
    spdlog::debug("joined '{}' at {}, release {}", request.job, peer(),
                  Printable(response.server_version(), kMaxNameBytes));
    MutexLock lock(mutex_);
    signers_[membership->token] = request.signer;
    return membership;
  }

  absl::Status Attach(SessionToken token, const std::string& identity,
                      std::shared_ptr<NodeSink> sink) override {
    // The lock is held during Open, which only starts the streams, so that a second Attach finds
    // this one.
    MutexLock lock(mutex_);
    auto [entry, is_new] = streams_.try_emplace(token);
    if (!is_new) {
      return absl::FailedPreconditionError(absl::StrCat("already attached to ", peer_));
    }
    const auto signer = signers_.find(token);
    const ShardStreams::Ticket ticket{token, identity,
                                      signer == signers_.end() ? nullptr : signer->second};
    entry->second = ShardStreams::Open({connections_, peer_, ticket, options_.grace},
                                       std::move(sink), counters_);
    return absl::OkStatus();
  }

  absl::Status RegisterBucket(SessionToken token, const BucketAnnouncement& bucket,
                              TimePoint deadline) override {
    v1::RegisterBucketResponse response;
    return Named(
        CallAgain(&v1::Control::Stub::RegisterBucket, ToProto(token, bucket), &response, deadline));
  }

  absl::Status Contribute(SessionToken token, Contribution contribution) override {
    std::shared_ptr<ShardStreams> streams;
    {
      MutexLock lock(mutex_);
      const auto entry = streams_.find(token);
      if (entry == streams_.end()) {
        return absl::FailedPreconditionError(absl::StrCat("not attached to ", peer_));
      }
      streams = entry->second;
    }
    return streams->Send(contribution);
  }

  absl::StatusOr<std::vector<float>> ReadResidual(SessionToken token, BucketId bucket,
                                                  uint32_t chunk, TimePoint deadline) override {
    v1::ReadResidualRequest request;
    request.set_token(token);
    *request.mutable_bucket() = ToProto(bucket);
    request.set_chunk(chunk);
    v1::ReadResidualResponse response;
    THALWEG_RETURN_IF_ERROR(
        Named(CallAgain(&v1::Control::Stub::ReadResidual, request, &response, deadline)));
    absl::StatusOr<std::vector<float>> values = FloatsFromBytes(response.values());
    if (!values.ok()) return Named(values.status());
    return values;
  }

  absl::Status WriteResidual(SessionToken token, BucketId bucket, uint32_t chunk,
                             std::span<const float> values, TimePoint deadline) override {
    v1::WriteResidualRequest request;
    request.set_token(token);
    *request.mutable_bucket() = ToProto(bucket);
    request.set_chunk(chunk);
    request.set_values(FloatsToBytes(values));
    v1::WriteResidualResponse response;
    return Named(CallAgain(&v1::Control::Stub::WriteResidual, request, &response, deadline));
  }

  absl::StatusOr<ClockReading> Heartbeat(SessionToken token, TimePoint deadline) override {
    v1::HeartbeatRequest request;
    request.set_token(token);
    v1::HeartbeatResponse response;
    THALWEG_RETURN_IF_ERROR(
        Named(CallAgain(&v1::Control::Stub::Heartbeat, request, &response, deadline)));
    return ClockReading{response.clock(), static_cast<int64_t>(response.clock_nanos())};
  }

  void Leave(SessionToken token, const absl::Status& reason) override {
    std::shared_ptr<ShardStreams> streams;
    {
      MutexLock lock(mutex_);
      if (auto entry = streams_.extract(token)) streams = std::move(entry.mapped());
      signers_.erase(token);
    }
    if (streams != nullptr) streams->Detach();

    const grpc::Status why = ToGrpc(reason);
    v1::LeaveRequest request;
    request.set_token(token);
    request.set_code(static_cast<uint32_t>(why.error_code()));
    request.set_reason(why.error_message());
    v1::LeaveResponse response;
    const absl::Status left =
        CallAgain(&v1::Control::Stub::Leave, request, &response, Now() + kLeaveTime);
    if (!left.ok()) {
      spdlog::info("{} could not be told that this node leaves: {}", peer(),
                   std::string(left.message()));
    }
    if (streams == nullptr) return;
    if (left.ok()) {
      streams->Finish();
      if (streams->WaitDone(Now() + kLeaveTime)) return;
    }
    CancelAndWait(*streams);
  }

 private:
  template <typename Request, typename Response>
  using Method = grpc::Status (v1::Control::Stub::*)(grpc::ClientContext*, const Request&,
                                                     Response*);

  template <typename Request, typename Response>
  absl::Status Call(Method<Request, Response> method, const Request& request, Response* response,
                    TimePoint deadline) {
    return FromGrpc(CallOnce(method, request, response, deadline));
  }

  // Repeats a call, which must be harmless, when the connection breaks, while the grace lasts.
  template <typename Request, typename Response>
  absl::Status CallAgain(Method<Request, Response> method, const Request& request,
                         Response* response, TimePoint deadline) {
    const TimePoint give_up = std::min(deadline, Now() + options_.grace);
    grpc::Status status = CallOnce(method, request, response, deadline);
    while (status.error_code() == grpc::StatusCode::UNAVAILABLE && !IsOurs(status) &&
           channel_->WaitForConnected(ToSystemTime(give_up))) {
      status = CallOnce(method, request, response, deadline);
    }
    return FromGrpc(status);
  }

  template <typename Request, typename Response>
  grpc::Status CallOnce(Method<Request, Response> method, const Request& request,
                        Response* response, TimePoint deadline) {
    grpc::ClientContext context;
    context.set_deadline(ToSystemTime(deadline));
    return (control_.get()->*method)(&context, request, response);
  }

  absl::Status ProveAndJoin(const JoinRequest& request, v1::JoinResponse* response,
                            TimePoint deadline) {
    v1::JoinRequest proto = ToProto(request);
    if (request.signer != nullptr) {
      v1::ChallengeResponse challenge;
      const absl::Status asked =
          Call(&v1::Control::Stub::Challenge, v1::ChallengeRequest(), &challenge, deadline);
      if (absl::IsUnimplemented(asked)) {
        return absl::FailedPreconditionError(
            "it cannot check a job's secret: install this node's release there");
      }
      THALWEG_RETURN_IF_ERROR(asked);
      proto.set_nonce(challenge.nonce());
      proto.set_proof(request.signer->Sign(JoinStatement(proto)));
    }
    return Call(&v1::Control::Stub::Join, proto, response, deadline);
  }

  // Returns what `call` returns, prefixed with the peer's name. The call starts when there is a
  // connection, or when the time left is too short to wait for one.
  absl::Status CallConnected(TimePoint deadline, const std::function<absl::Status()>& call) {
    const TimePoint begin = Now();
    const Duration left = Remaining(deadline, begin);
    const bool connected = channel_->WaitForConnected(
        ToSystemTime(begin + left - std::min<Duration>(left / 5, kReasonTime)));
    const absl::Status status = call();
    if (!connected && (absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status)) &&
        channel_->GetState(false) != GRPC_CHANNEL_READY) {
      return absl::UnavailableError(absl::StrCat(
          peer(), " cannot be reached within ", std::round(ToSeconds(left) * 10) / 10,
          " s: is it running, and is the address right?",
          options_.tls.enabled() ? " Does each end trust the other's certificate?" : "", " (",
          status.message(), ")"));
    }
    return Named(status);
  }

  absl::StatusOr<Duration> Probe(size_t padding_bytes, TimePoint deadline) {
    v1::ProbeRequest request;
    request.mutable_padding()->resize(padding_bytes);
    v1::ProbeResponse response;
    const TimePoint begin = Now();
    THALWEG_RETURN_IF_ERROR(Call(&v1::Control::Stub::Probe, request, &response, deadline));
    return Now() - begin;
  }

  std::shared_ptr<grpc::Channel> Connect() const {
    return grpc::CreateCustomChannel(address_, credentials_, ClientArguments());
  }

  // Connects the channels that streams will use, so that they are ready when the shard answers.
  void OpenConnections(const LinkSpeed& link) {
    const uint32_t wanted = options_.channels != 0                              ? options_.channels
                            : link.bytes_per_second < kOneChannelBytesPerSecond ? 1
                                                                                : 2;
    MutexLock lock(mutex_);
    while (connections_.size() < wanted) {
      connections_.push_back({Connect(), &pollers_->Next()});
      connections_.back().channel->GetState(/*try_to_connect=*/true);
    }
  }

  // Requires detached streams.
  void CancelAndWait(ShardStreams& streams) {
    streams.Cancel();
    if (!streams.WaitDone(Now() + kCancelTime)) {
      spdlog::error("{}: a stream has not ended after it was cancelled", peer());
    }
  }

  std::string peer() {
    MutexLock lock(mutex_);
    return peer_;
  }
  absl::Status Named(const absl::Status& status) { return Prefixed(peer(), status); }

  const std::string address_;
  const Options options_;
  const StreamCounters counters_;
  const std::shared_ptr<Pollers> pollers_;
  const std::shared_ptr<grpc::ChannelCredentials> credentials_;
  const std::shared_ptr<grpc::Channel> channel_;  // used by the control calls and the first stream
  const std::unique_ptr<v1::Control::Stub> control_;

  Mutex mutex_;
  std::string peer_ ABSL_GUARDED_BY(mutex_);
  std::vector<ShardStreams::Connection> connections_ ABSL_GUARDED_BY(mutex_);
  std::map<SessionToken, std::shared_ptr<ShardStreams>> streams_ ABSL_GUARDED_BY(mutex_);
  // These prove the memberships' identities, if anything does.
  std::map<SessionToken, std::shared_ptr<const JobSigner>> signers_ ABSL_GUARDED_BY(mutex_);
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
