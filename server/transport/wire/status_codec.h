// This header converts absl::Status to and from what gRPC carries. Both number their codes alike
// (google.rpc.Code).
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "grpcpp/support/status.h"

namespace thalweg {

// Messages are Printable in both directions, and cut to kMaxReasonBytes (core/base): they are
// logged and passed on.
grpc::Status ToGrpc(const absl::Status& status);
absl::Status FromGrpc(const grpc::Status& status);

// Says whether ToGrpc has made the status, at either end of a connection. gRPC makes up others when
// a connection breaks.
bool IsOurs(const grpc::Status& status);

// Converts a code and a message from fields in the same way; a number outside google.rpc.Code
// becomes kUnknown.
absl::Status StatusFromWire(uint32_t code, const std::string& message);

// Returns `status` with "<who>: " before its message; OK stays OK.
absl::Status Prefixed(const std::string& who, const absl::Status& status);

}  // namespace thalweg
