#include "server/transport/remote_shard.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "grpcpp/grpcpp.h"
#include "server/transport/channel_options.h"
#include "server/transport/client_stream.h"
#include "server/transport/control_codec.h"
#include "server/transport/status_codec.h"
#include "spdlog/spdlog.h"
#include "thalweg/v1/control.grpc.pb.h"

namespace thalweg {
namespace {

constexpr Duration kLeaveTime = std::chrono::seconds(2);
// What a cancelled stream needs to end: no network is involved any more.
constexpr Duration kCancelTime = std::chrono::seconds(10);
// Kept from Join's time for finding out why there is no connection.
constexpr Duration kProbeTime = std::chrono::milliseconds(500);

class GrpcRemoteShard final : public RemoteShard {
 public:
  GrpcRemoteShard(const std::string& address, MetricRegistry& metrics)
      : address_(address),
        counters_(StreamCounters::In(metrics, "client")),
        channel_(grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(),
                                           ClientArguments())),
        control_(v1::Control::NewStub(channel_)),
        peer_(absl::StrCat("aggregator at ", address)) {}

  ~GrpcRemoteShard() override {
    std::map<SessionToken, std::shared_ptr<ClientStream>> streams;
    {
      MutexLock lock(mutex_);
      streams.swap(streams_);
    }
    for (auto& [token, stream] : streams) stream->Detach();
    for (auto& [token, stream] : streams) CancelAndWait(*stream);
  }

  absl::StatusOr<Membership> Join(const JoinRequest& request, TimePoint deadline) override {
    {
      MutexLock lock(mutex_);
      peer_ = absl::StrCat("aggregator shard ", request.shard, " at ", address_);
    }
    const TimePoint begin = Now();
    const Duration left = Remaining(deadline, begin);
    const bool connected = channel_->WaitForConnected(
        ToSystemTime(begin + left - std::min<Duration>(left / 5, kProbeTime)));
    v1::JoinResponse response;
    const absl::Status status =
        Call(&v1::Control::Stub::Join, ToProto(request), &response, deadline);
    if (!connected && (absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status)) &&
        channel_->GetState(false) != GRPC_CHANNEL_READY) {
      return absl::UnavailableError(
          absl::StrCat(peer(), " cannot be reached within ", std::round(ToSeconds(left) * 10) / 10,
                       " s: is it running, and is the address right? (", status.message(), ")"));
    }
    THALWEG_RETURN_IF_ERROR(Named(status));
    absl::StatusOr<Membership> membership = FromProto(response);
    if (!membership.ok()) return Named(membership.status());
    spdlog::debug("joined '{}' at {}, release {}", request.job, peer(), response.server_version());
    return membership;
  }

  absl::Status Attach(SessionToken token, std::shared_ptr<NodeSink> sink) override {
    // Held over Open, which only starts the stream: a second Attach must find this one.
    MutexLock lock(mutex_);
    auto [entry, is_new] = streams_.try_emplace(token);
    if (!is_new) {
      return absl::FailedPreconditionError(absl::StrCat("already attached to ", peer_));
    }
    entry->second = ClientStream::Open(channel_, peer_, token, std::move(sink), counters_);
    return absl::OkStatus();
  }

  absl::Status RegisterBucket(SessionToken token, BucketId id, const BucketLayout& layout,
                              TimePoint deadline) override {
    v1::RegisterBucketResponse response;
    return Named(
        Call(&v1::Control::Stub::RegisterBucket, ToProto(token, id, layout), &response, deadline));
  }

  absl::Status Contribute(SessionToken token, Contribution contribution) override {
    std::shared_ptr<ClientStream> stream;
    {
      MutexLock lock(mutex_);
      const auto entry = streams_.find(token);
      if (entry == streams_.end()) {
        return absl::FailedPreconditionError(absl::StrCat("not attached to ", peer_));
      }
      stream = entry->second;
    }
    return stream->Send(contribution);
  }

  absl::Status Heartbeat(SessionToken token, TimePoint deadline) override {
    v1::HeartbeatRequest request;
    request.set_token(token);
    v1::HeartbeatResponse response;
    return Named(Call(&v1::Control::Stub::Heartbeat, request, &response, deadline));
  }

  void Leave(SessionToken token, const absl::Status& reason) override {
    std::shared_ptr<ClientStream> stream;
    {
      MutexLock lock(mutex_);
      if (auto entry = streams_.extract(token)) stream = std::move(entry.mapped());
    }
    if (stream != nullptr) stream->Detach();

    const grpc::Status why = ToGrpc(reason);
    v1::LeaveRequest request;
    request.set_token(token);
    request.set_code(static_cast<uint32_t>(why.error_code()));
    request.set_reason(why.error_message());
    v1::LeaveResponse response;
    const absl::Status left =
        Call(&v1::Control::Stub::Leave, request, &response, Now() + kLeaveTime);
    if (!left.ok()) {
      spdlog::info("{} was not told that this node leaves: {}", peer(),
                   std::string(left.message()));
    }
    if (stream == nullptr) return;
    if (left.ok()) {
      stream->Finish();
      if (stream->WaitDone(Now() + kLeaveTime)) return;
    }
    CancelAndWait(*stream);
  }

 private:
  template <typename Request, typename Response>
  absl::Status Call(grpc::Status (v1::Control::Stub::*method)(grpc::ClientContext*, const Request&,
                                                              Response*),
                    const Request& request, Response* response, TimePoint deadline) {
    grpc::ClientContext context;
    context.set_deadline(ToSystemTime(deadline));
    return FromGrpc((control_.get()->*method)(&context, request, response));
  }

  // Requires that the stream is detached.
  void CancelAndWait(ClientStream& stream) {
    stream.Cancel();
    if (!stream.WaitDone(Now() + kCancelTime)) {
      spdlog::error("{}: a stream has not ended after it was cancelled", peer());
    }
  }

  std::string peer() {
    MutexLock lock(mutex_);
    return peer_;
  }
  absl::Status Named(const absl::Status& status) { return Prefixed(peer(), status); }

  const std::string address_;
  const StreamCounters counters_;
  const std::shared_ptr<grpc::Channel> channel_;
  const std::unique_ptr<v1::Control::Stub> control_;

  Mutex mutex_;
  std::string peer_ ABSL_GUARDED_BY(mutex_);
  std::map<SessionToken, std::shared_ptr<ClientStream>> streams_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

std::unique_ptr<RemoteShard> RemoteShard::Create(const std::string& address,
                                                 MetricRegistry& metrics) {
  return std::make_unique<GrpcRemoteShard>(address, metrics);
}

}  // namespace thalweg
