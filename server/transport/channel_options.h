// This header declares the gRPC settings of both ends of a connection.
#pragma once

#include "core/base/clock.h"
#include "grpcpp/server_builder.h"
#include "grpcpp/support/channel_arguments.h"

namespace thalweg {

grpc::ChannelArguments ClientArguments();
void ApplyServerArguments(grpc::ServerBuilder& builder);

// Converts a deadline for gRPC, which counts deadlines on the wall clock; ours are monotonic.
std::chrono::system_clock::time_point ToSystemTime(TimePoint deadline);

}  // namespace thalweg
