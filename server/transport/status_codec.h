// This header converts absl::Status to and from what gRPC carries. Both number their codes alike
// (google.rpc.Code).
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "grpcpp/support/status.h"

namespace thalweg {

// gRPC sends a status as HTTP/2 metadata, of which a receiver accepts 8 KiB; bytes outside plain
// ASCII take three each. Longer messages are truncated to this length.
inline constexpr size_t kMaxStatusMessageBytes = 2000;

grpc::Status ToGrpc(const absl::Status& status);
absl::Status FromGrpc(const grpc::Status& status);

// Says whether ToGrpc has made the status, at either end of a connection. gRPC makes up others when
// a connection breaks.
bool IsOurs(const grpc::Status& status);

// Converts a code from a message field; a number outside google.rpc.Code becomes kUnknown.
absl::Status StatusFromWire(uint32_t code, const std::string& message);

// Returns `status` with "<who>: " before its message; OK stays OK.
absl::Status Prefixed(const std::string& who, const absl::Status& status);

}  // namespace thalweg
