// KnownMember is a RemoteMember for this room's tests that know its token.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "core/base/status_macros.h"
#include "grpcpp/grpcpp.h"
#include "server/base/metrics.h"
#include "server/transport/node/control_client.h"
#include "server/transport/node/remote_member.h"
#include "server/transport/node/shard_streams.h"
#include "server/transport/poller.h"
#include "server/transport/stream_counters.h"
#include "server/transport/testing/recorder.h"
#include "server/transport/wire/control_codec.h"
#include "server/transport/wire/session_token.h"

namespace thalweg {

// A KnownMember has one stream, and is made of what a RemoteShard is made of.
class KnownMember {
 public:
  // Opens the stream of a membership, which need not exist. `metrics` must outlive the object.
  KnownMember(const std::shared_ptr<grpc::Channel>& channel, ShardStreams::Ticket ticket,
              Terms terms, std::shared_ptr<MemberEvents> events, MetricRegistry& metrics)
      : token_(ticket.token),
        member_(
            std::make_unique<ControlClient>(ControlClient::Options{.name = "the shard"}, channel),
            token_, std::move(terms),
            ShardStreams::Open({{{channel, &pollers_.Next()}}, "the shard", std::move(ticket)},
                               std::move(events), StreamCounters::In(metrics, "client"))) {}

  // Joins, and waits for the other nodes.
  static absl::StatusOr<std::unique_ptr<KnownMember>> Join(
      const std::shared_ptr<grpc::Channel>& channel, const JoinRequest& request,
      std::shared_ptr<MemberEvents> events, MetricRegistry& metrics) {
    v1::JoinResponse response;
    THALWEG_RETURN_IF_ERROR(ControlClient({.name = "the shard"}, channel)
                                .Join(request, &response, Now() + kTestPatience));
    THALWEG_ASSIGN_OR_RETURN(Terms terms, FromProto(response));
    return std::make_unique<KnownMember>(
        channel, ShardStreams::Ticket{response.token(), request.identity, request.signer},
        std::move(terms), std::move(events), metrics);
  }

  SessionToken token() const { return token_; }
  Member& member() { return member_; }

 private:
  const SessionToken token_;
  Pollers pollers_{1};
  RemoteMember member_;
};

}  // namespace thalweg
