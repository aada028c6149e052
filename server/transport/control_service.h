// ControlService implements control.proto: unary calls to a Shard.
#pragma once

#include <atomic>
#include <cstdint>

#include "absl/status/statusor.h"
#include "core/base/clock.h"
#include "core/base/exchange.h"
#include "server/identity/challenges.h"
#include "thalweg/v1/control.grpc.pb.h"

namespace thalweg {

// The service is thread-safe. A Join blocks one of gRPC's threads, so at most `max_waiting_joins`
// of them wait at a time, and others get ResourceExhausted.
class ControlService final : public v1::Control::Service {
 public:
  // `shard` must outlive the service.
  ControlService(Shard& shard, Duration challenge_lifetime, uint32_t max_waiting_joins)
      : shard_(shard), max_waiting_joins_(max_waiting_joins), challenges_(challenge_lifetime) {}

  grpc::Status Probe(grpc::ServerContext* context, const v1::ProbeRequest* request,
                     v1::ProbeResponse* response) override;
  grpc::Status Challenge(grpc::ServerContext* context, const v1::ChallengeRequest* request,
                         v1::ChallengeResponse* response) override;
  grpc::Status Join(grpc::ServerContext* context, const v1::JoinRequest* request,
                    v1::JoinResponse* response) override;
  grpc::Status RegisterBucket(grpc::ServerContext* context,
                              const v1::RegisterBucketRequest* request,
                              v1::RegisterBucketResponse* response) override;
  grpc::Status ReadResidual(grpc::ServerContext* context, const v1::ReadResidualRequest* request,
                            v1::ReadResidualResponse* response) override;
  grpc::Status WriteResidual(grpc::ServerContext* context, const v1::WriteResidualRequest* request,
                             v1::WriteResidualResponse* response) override;
  grpc::Status Heartbeat(grpc::ServerContext* context, const v1::HeartbeatRequest* request,
                         v1::HeartbeatResponse* response) override;
  grpc::Status Leave(grpc::ServerContext* context, const v1::LeaveRequest* request,
                     v1::LeaveResponse* response) override;

 private:
  // Joins the shard, unless too many nodes wait there already.
  absl::StatusOr<Membership> WaitToJoin(const JoinRequest& request, TimePoint deadline);

  Shard& shard_;
  const uint32_t max_waiting_joins_;
  Challenges challenges_;
  std::atomic<uint32_t> waiting_joins_{0};
};

}  // namespace thalweg
