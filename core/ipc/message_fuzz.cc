// Frames of a worker or of a sidecar: what is accepted is exactly what EncodeFrame makes.

#include <string>

#include "core/base/fuzzing.h"
#include "core/ipc/message.h"

namespace thalweg::ipc {
namespace {

void Parse(std::span<const std::byte> frame) {
  const auto start = frame.first(kFrameHeaderBytes);
  const auto header = ParseFrameHeader(start);
  if (!header.ok()) {
    return Promise(absl::IsInvalidArgument(header.status()), "a header is refused as invalid");
  }
  Promise(header->body_bytes <= kMaxFrameBytes, "a body has bounded length");
  const auto body = frame.subspan(kFrameHeaderBytes);
  const auto message = ParseBody(header->type, body);
  if (!message.ok()) {
    return Promise(absl::IsInvalidArgument(message.status()), "a body is refused as invalid");
  }
  const std::string again = EncodeFrame(*message, header->has_fd);
  const auto bytes = std::as_bytes(std::span(again.data(), again.size()));
  Promise(std::equal(body.begin(), body.end(), bytes.begin() + kFrameHeaderBytes, bytes.end()),
          "a message has one encoding");
}

}  // namespace
}  // namespace thalweg::ipc

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  if (size >= thalweg::ipc::kFrameHeaderBytes) thalweg::ipc::Parse(bytes);
  return 0;
}
