#include "server/transport/control_service.h"

#include <algorithm>
#include <chrono>

#include "absl/strings/str_cat.h"
#include "core/base/log.h"
#include "server/transport/control_codec.h"
#include "server/transport/link_probe.h"
#include "server/transport/proofs.h"
#include "server/transport/status_codec.h"
#include "spdlog/spdlog.h"

namespace thalweg {
namespace {

// This bound applies to callers that set no deadline, or one that is later.
constexpr Duration kLongestCall = std::chrono::hours(1);
// The shard answers this much before the caller's deadline, so that the answer arrives in time.
constexpr Duration kAnswerTime = std::chrono::milliseconds(500);

// Returns when the shard must answer, so that the caller gets the shard's reason and not gRPC's
// "Deadline Exceeded".
TimePoint AnswerBy(const grpc::ServerContext& context) {
  const auto left = context.deadline() - std::chrono::system_clock::now();
  const Duration bounded = std::clamp<Duration>(
      std::chrono::duration_cast<Duration>(std::min<decltype(left)>(left, kLongestCall)),
      Duration::zero(), kLongestCall);
  return Now() + bounded - std::min<Duration>(bounded / 10, kAnswerTime);
}

}  // namespace

grpc::Status ControlService::Probe(grpc::ServerContext* /*context*/,
                                   const v1::ProbeRequest* request,
                                   v1::ProbeResponse* /*response*/) {
  const size_t bytes = request->padding().size();
  if (bytes <= kMaxProbeBytes) return grpc::Status::OK;
  return ToGrpc(absl::InvalidArgumentError(
      absl::StrCat("a probe of ", bytes, " bytes, expected at most ", kMaxProbeBytes)));
}

grpc::Status ControlService::Challenge(grpc::ServerContext* /*context*/,
                                       const v1::ChallengeRequest* /*request*/,
                                       v1::ChallengeResponse* response) {
  response->set_nonce(challenges_.Draw(Now()));
  return grpc::Status::OK;
}

grpc::Status ControlService::Join(grpc::ServerContext* context, const v1::JoinRequest* request,
                                  v1::JoinResponse* response) {
  absl::StatusOr<JoinRequest> parsed = FromProto(*request);
  if (!parsed.ok()) return ToGrpc(parsed.status());
  if (const absl::Status proved = CheckProof(*request, challenges_, Now()); !proved.ok()) {
    // Strangers can cause this as often as they like, so it is not logged by default.
    spdlog::debug("{}: refused to join: {}", context->peer(), Text(proved));
    return ToGrpc(proved);
  }
  parsed->identity = request->identity();
  const absl::StatusOr<Membership> membership = WaitToJoin(*parsed, AnswerBy(*context));
  if (!membership.ok()) return ToGrpc(membership.status());
  if (context->IsCancelled()) {
    // The caller has gone and will not use the membership; without Leave, the other nodes would
    // wait for its lease to end.
    shard_.Leave(membership->token, absl::UnavailableError("gave up while the job was joining"));
    return grpc::Status::CANCELLED;
  }
  *response = ToProto(*membership);
  return grpc::Status::OK;
}

absl::StatusOr<Membership> ControlService::WaitToJoin(const JoinRequest& request,
                                                      TimePoint deadline) {
  absl::StatusOr<Membership> membership = absl::ResourceExhaustedError(
      absl::StrCat("job '", request.job, "': ", max_waiting_joins_,
                   " nodes wait here for the other nodes of their jobs already, try again later"));
  if (waiting_joins_++ < max_waiting_joins_) membership = shard_.Join(request, deadline);
  --waiting_joins_;
  return membership;
}

grpc::Status ControlService::RegisterBucket(grpc::ServerContext* context,
                                            const v1::RegisterBucketRequest* request,
                                            v1::RegisterBucketResponse* /*response*/) {
  const absl::StatusOr<BucketAnnouncement> bucket = FromProto(*request);
  if (!bucket.ok()) return ToGrpc(bucket.status());
  return ToGrpc(shard_.RegisterBucket(request->token(), *bucket, AnswerBy(*context)));
}

grpc::Status ControlService::ReadResidual(grpc::ServerContext* context,
                                          const v1::ReadResidualRequest* request,
                                          v1::ReadResidualResponse* response) {
  const auto values = shard_.ReadResidual(request->token(), FromProto(request->bucket()),
                                          request->chunk(), AnswerBy(*context));
  if (!values.ok()) return ToGrpc(values.status());
  response->set_values(FloatsToBytes(*values));
  return grpc::Status::OK;
}

grpc::Status ControlService::WriteResidual(grpc::ServerContext* context,
                                           const v1::WriteResidualRequest* request,
                                           v1::WriteResidualResponse* /*response*/) {
  const auto values = FloatsFromBytes(request->values());
  if (!values.ok()) return ToGrpc(values.status());
  return ToGrpc(shard_.WriteResidual(request->token(), FromProto(request->bucket()),
                                     request->chunk(), *values, AnswerBy(*context)));
}

grpc::Status ControlService::Heartbeat(grpc::ServerContext* context,
                                       const v1::HeartbeatRequest* request,
                                       v1::HeartbeatResponse* response) {
  const auto reading = shard_.Heartbeat(request->token(), AnswerBy(*context));
  if (!reading.ok()) return ToGrpc(reading.status());
  response->set_clock(reading->clock);
  response->set_clock_nanos(static_cast<uint64_t>(reading->nanos));
  return grpc::Status::OK;
}

grpc::Status ControlService::Leave(grpc::ServerContext* /*context*/,
                                   const v1::LeaveRequest* request,
                                   v1::LeaveResponse* /*response*/) {
  shard_.Leave(request->token(), StatusFromWire(request->code(), request->reason()));
  return grpc::Status::OK;
}

}  // namespace thalweg
