#include "server/transport/wire/small_frames.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/transport/wire/status_codec.h"
#include "thalweg/v1/exchange.pb.h"

namespace thalweg {
namespace {

absl::Status Malformed(const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat("malformed frame: ", what));
}

absl::Status ReasonOf(const v1::Failure& failure) {
  const absl::Status why = StatusFromWire(failure.code(), failure.message());
  if (!why.ok()) return why;
  return StatusFromWire(static_cast<uint32_t>(absl::StatusCode::kUnknown), failure.message());
}

grpc::ByteBuffer Encode(const v1::Frame& frame) {
  const grpc::Slice slice(frame.SerializeAsString());
  return grpc::ByteBuffer(&slice, 1);
}

}  // namespace

absl::StatusOr<ParsedFrame> ParseSmallFrame(const std::string& bytes) {
  v1::Frame frame;
  if (!frame.ParseFromString(bytes)) return Malformed("not a Frame message");
  switch (frame.kind_case()) {
    case v1::Frame::kOpen:
      return OpenFrame{frame.open().token(),    frame.open().stream(), frame.open().num_streams(),
                       frame.open().identity(), frame.open().proof(),  frame.open().incarnation(),
                       frame.open().received()};
    case v1::Frame::kFailure:
      return FailureFrame{ReasonOf(frame.failure())};
    case v1::Frame::kResumed:
      return ResumedFrame{frame.resumed().received()};
    case v1::Frame::kAcknowledged:
      return AcknowledgedFrame{frame.acknowledged().received()};
    case v1::Frame::kChunk:
      return Malformed("a chunk must be the only field of its frame");
    case v1::Frame::KIND_NOT_SET:
      break;
  }
  return Malformed("expected open, chunk, failure, resumed or acknowledged, got none of them");
}

grpc::ByteBuffer EncodeOpen(const OpenFrame& open) {
  v1::Frame frame;
  frame.mutable_open()->set_token(open.token);
  frame.mutable_open()->set_stream(open.stream);
  frame.mutable_open()->set_num_streams(open.num_streams);
  frame.mutable_open()->set_identity(open.identity);
  frame.mutable_open()->set_proof(open.proof);
  frame.mutable_open()->set_incarnation(open.incarnation);
  frame.mutable_open()->set_received(open.received);
  return Encode(frame);
}

grpc::ByteBuffer EncodeFailure(const absl::Status& why) {
  const grpc::Status status = ToGrpc(why);
  v1::Frame frame;
  frame.mutable_failure()->set_code(static_cast<uint32_t>(status.error_code()));
  frame.mutable_failure()->set_message(status.error_message());
  return Encode(frame);
}

grpc::ByteBuffer EncodeResumed(const ResumedFrame& resumed) {
  v1::Frame frame;
  frame.mutable_resumed()->set_received(resumed.received);
  return Encode(frame);
}

grpc::ByteBuffer EncodeAcknowledged(const AcknowledgedFrame& acknowledged) {
  v1::Frame frame;
  frame.mutable_acknowledged()->set_received(acknowledged.received);
  return Encode(frame);
}

}  // namespace thalweg
