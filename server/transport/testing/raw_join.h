// RawJoin joins without a RemoteShard, for this room's tests that show a membership's token.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>

#include "core/base/protocol.h"
#include "grpcpp/grpcpp.h"
#include "server/transport/channel_options.h"
#include "server/transport/testing/raw_stream.h"
#include "server/transport/testing/recording_shard.h"
#include "server/transport/wire/frame_codec.h"
#include "server/transport/wire/session_token.h"
#include "thalweg/v1/control.grpc.pb.h"

namespace thalweg {

// Returns a correct request to join.
inline v1::JoinRequest ProtoOfNode(uint32_t node) {
  v1::JoinRequest request;
  request.set_node(node);
  request.set_max_wire_version(kWireVersion);
  request.set_codec("fp32");
  return request;
}

// Joins and sets the token of the new membership.
inline grpc::Status RawJoin(const std::shared_ptr<grpc::Channel>& channel,
                            const v1::JoinRequest& request, SessionToken* token) {
  grpc::ClientContext context;
  context.set_deadline(ToSystemTime(Now() + kTestPatience));
  v1::JoinResponse response;
  const grpc::Status status = v1::Control::NewStub(channel)->Join(&context, request, &response);
  *token = response.token();
  return status;
}

// Joins as this node and returns the token of the new membership.
inline SessionToken JoinedToken(const std::shared_ptr<grpc::Channel>& channel, uint32_t node) {
  SessionToken token = 0;
  const grpc::Status status = RawJoin(channel, ProtoOfNode(node), &token);
  EXPECT_TRUE(status.ok()) << status.error_message();
  return token;
}

// Waits until the server has taken the stream, whose open frame has been written. It sends what
// causes no answer: a result, which the node need not have.
inline void AwaitOpened(RawStream& stream, RecordingShard& shard) {
  const size_t count = shard.supplied.Get().size() + 1;
  ASSERT_TRUE(stream.Write(EncodeChunk({.id = {{}, 0, 1}, .kind = ChunkKind::kResult}, {})));
  ASSERT_EQ(shard.supplied.WaitFor(count).size(), count);
}

}  // namespace thalweg
