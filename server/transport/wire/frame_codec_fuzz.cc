// Frames of exchange.proto: what is accepted is accepted by protobuf too, and has the same payload.
// The first byte says where the frame is cut into slices.

#include <bit>
#include <string>
#include <utility>
#include <vector>

#include "core/base/fuzzing.h"
#include "server/transport/wire/frame_codec.h"
#include "thalweg/v1/exchange.pb.h"

namespace thalweg {
namespace {

grpc::ByteBuffer Cut(const std::string& bytes, size_t at) {
  std::vector<grpc::Slice> slices;
  for (const auto& piece : {bytes.substr(0, at), bytes.substr(std::min(at, bytes.size()))}) {
    slices.emplace_back(piece.data(), piece.size());
  }
  return {slices.data(), slices.size()};
}

std::string Join(const Payload& payload) {
  std::string bytes;
  for (const auto& piece : payload.pieces) {
    bytes.append(reinterpret_cast<const char*>(piece.data()), piece.size());
  }
  return bytes;
}

void CheckChunk(const ChunkFrame& chunk, const v1::Chunk& reference) {
  Promise(Join(chunk.payload) == reference.payload(), "the payload is protobuf's");
  Promise(chunk.header.id.round == reference.round(), "the round is protobuf's");
  Promise(chunk.header.elems == reference.elems(), "the number of elements is protobuf's");
  const absl::StatusOr<ParsedFrame> again = ParseFrame(EncodeChunk(chunk.header, chunk.payload));
  Promise(again.ok(), "an accepted chunk can be sent on");
  ChunkHeader received = chunk.header;
  ChunkHeader sent = std::get<ChunkFrame>(*again).header;
  // A NaN, which shards refuse later, equals nothing.
  Promise(std::bit_cast<uint64_t>(std::exchange(received.loss_scale, 0)) ==
              std::bit_cast<uint64_t>(std::exchange(sent.loss_scale, 0)),
          "a loss scale survives being sent on");
  Promise(received == sent, "a chunk survives being sent on");
}

void Parse(const std::string& bytes, size_t cut) {
  const absl::StatusOr<ParsedFrame> frame = ParseFrame(Cut(bytes, cut));
  if (!frame.ok()) {
    return Promise(absl::IsInvalidArgument(frame.status()), "a frame is refused as invalid");
  }
  v1::Frame reference;
  Promise(reference.ParseFromString(bytes), "protobuf accepts what is accepted");
  if (const auto* chunk = std::get_if<ChunkFrame>(&*frame)) CheckChunk(*chunk, reference.chunk());
  if (const auto* failure = std::get_if<FailureFrame>(&*frame)) {
    Promise(!failure->why.ok(), "a failure is no success");
  }
}

}  // namespace
}  // namespace thalweg

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  thalweg::FuzzInput input(data, size);
  const size_t cut = input.Byte();
  thalweg::Parse(input.Text(size), cut);
  return 0;
}
