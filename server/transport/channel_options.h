// gRPC settings that both ends of a connection must agree on or profit from.
#pragma once

#include "core/base/clock.h"
#include "grpcpp/server_builder.h"
#include "grpcpp/support/channel_arguments.h"

namespace thalweg {

grpc::ChannelArguments ClientArguments();
void ApplyServerArguments(grpc::ServerBuilder& builder);

// gRPC counts deadlines on the wall clock; ours are monotonic.
std::chrono::system_clock::time_point ToSystemTime(TimePoint deadline);

}  // namespace thalweg
