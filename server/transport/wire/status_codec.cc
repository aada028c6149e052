#include "server/transport/wire/status_codec.h"

#include "absl/strings/str_cat.h"
#include "core/base/protocol.h"
#include "server/base/printable.h"

namespace thalweg {
namespace {

constexpr char kOurs[] = "thalweg";

}  // namespace

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  return grpc::Status(static_cast<grpc::StatusCode>(status.raw_code()),
                      Printable(status.message(), kMaxReasonBytes), kOurs);
}

absl::Status FromGrpc(const grpc::Status& status) {
  return StatusFromWire(static_cast<uint32_t>(status.error_code()), status.error_message());
}

absl::Status StatusFromWire(uint32_t code, const std::string& message) {
  constexpr auto kLast = static_cast<uint32_t>(absl::StatusCode::kUnauthenticated);
  return absl::Status(
      code > kLast ? absl::StatusCode::kUnknown : static_cast<absl::StatusCode>(code),
      Printable(message, kMaxReasonBytes));
}

bool IsOurs(const grpc::Status& status) { return status.error_details() == kOurs; }

absl::Status Prefixed(const std::string& who, const absl::Status& status) {
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat(who, ": ", status.message()));
}

}  // namespace thalweg
