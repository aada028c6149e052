#include "server/transport/status_codec.h"

#include "absl/strings/str_cat.h"

namespace thalweg {
namespace {

constexpr char kOurs[] = "thalweg";

}  // namespace

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  std::string message(status.message());
  if (message.size() > kMaxStatusMessageBytes) {
    // The cut is between characters: a Failure message must stay valid UTF-8.
    size_t end = kMaxStatusMessageBytes;
    while (end > 0 && (static_cast<uint8_t>(message[end]) & 0xc0) == 0x80) --end;
    message.resize(end);
    message += "...";
  }
  return grpc::Status(static_cast<grpc::StatusCode>(status.raw_code()), message, kOurs);
}

absl::Status FromGrpc(const grpc::Status& status) {
  return StatusFromWire(static_cast<uint32_t>(status.error_code()), status.error_message());
}

absl::Status StatusFromWire(uint32_t code, const std::string& message) {
  constexpr auto kLast = static_cast<uint32_t>(absl::StatusCode::kUnauthenticated);
  if (code > kLast) return absl::UnknownError(message);
  return absl::Status(static_cast<absl::StatusCode>(code), message);
}

bool IsOurs(const grpc::Status& status) { return status.error_details() == kOurs; }

absl::Status Prefixed(const std::string& who, const absl::Status& status) {
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat(who, ": ", status.message()));
}

}  // namespace thalweg
