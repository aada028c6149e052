// This header declares the gRPC settings of both ends of a connection.
#pragma once

#include "core/base/clock.h"
#include "grpcpp/server_builder.h"
#include "grpcpp/support/channel_arguments.h"

namespace thalweg {

// At most this many calls and streams are open on one connection; gRPC's clients wait for a place,
// and others lose the connection. A sidecar has one connection to a shard for all its jobs.
inline constexpr int kMaxStreamsOfConnection = 64;

// An end whose peer acknowledges nothing for this time loses the connection.
inline constexpr int kKeepaliveTimeoutMs = 5'000;

grpc::ChannelArguments ClientArguments();
// `idle`: how long a connection may have neither a call nor a stream.
void ApplyServerArguments(grpc::ServerBuilder& builder, Duration idle);

// Converts a deadline for gRPC, which counts deadlines on the wall clock; ours are monotonic.
std::chrono::system_clock::time_point ToSystemTime(TimePoint deadline);

}  // namespace thalweg
