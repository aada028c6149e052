// This header converts frames of exchange.proto to and from bytes. Chunk frames are encoded and
// parsed by hand, so that their payload is never copied: sent payloads refer to the caller's
// memory, received ones to the received slices. docs/wire.md describes the bytes.
//
// All functions are stateless and may be called from any thread.
#pragma once

#include <cstdint>
#include <string>
#include <variant>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/payload.h"
#include "core/base/protocol.h"
#include "grpcpp/support/byte_buffer.h"
#include "server/transport/wire/chunk_fields.h"
#include "server/transport/wire/session_token.h"

namespace thalweg {

// kMaxPayloadBytes is the largest payload of a chunk.
inline constexpr size_t kMaxPayloadBytes = 2 * kMaxChunkBytes;
// Encoding makes a chunk longer in a format that sends indices beside elements, if every element
// crosses. Only float32 chunks have lossy encodings.
static_assert(kMaxPayloadBytes >= MaxLossyBytes(kMaxChunkBytes / SizeOf(DType::kFloat32)));
// kMaxFrameBytes is the largest message that either side accepts; gRPC refuses a longer one before
// it is buffered.
inline constexpr size_t kMaxFrameBytes = kMaxPayloadBytes + 4096;
// A node may open at most this many streams to one shard.
inline constexpr uint32_t kMaxStreams = 16;
// This is the largest frame that is not a chunk; such frames are copied to be parsed.
inline constexpr size_t kMaxSmallFrameBytes = 64 << 10;

struct OpenFrame {
  SessionToken token = 0;
  uint32_t stream = 0;
  uint32_t num_streams = 1;
  std::string identity = {};
  std::string proof = {};    // CheckProof (proofs.h) says whether it fits
  uint32_t incarnation = 0;  // from 1, one more each time the stream is opened; 0: only once
  uint64_t received = 0;     // results that earlier incarnations have received
};
struct ChunkFrame {
  ChunkHeader header;
  Payload payload;  // refers to the received slices and keeps them alive
};
struct FailureFrame {
  absl::Status why;  // never OK
};
struct ResumedFrame {
  uint64_t received = 0;  // contributions that earlier incarnations have received
};
struct AcknowledgedFrame {
  uint64_t received = 0;  // chunk frames that the sender has received on this stream
};
using ParsedFrame =
    std::variant<OpenFrame, ChunkFrame, FailureFrame, ResumedFrame, AcknowledgedFrame>;

grpc::ByteBuffer EncodeOpen(const OpenFrame& open);
// Encodes a chunk frame; the buffer keeps `payload.owner` alive until gRPC has sent it.
grpc::ByteBuffer EncodeChunk(const ChunkHeader& header, const Payload& payload);
grpc::ByteBuffer EncodeFailure(const absl::Status& why);
grpc::ByteBuffer EncodeResumed(const ResumedFrame& resumed);
grpc::ByteBuffer EncodeAcknowledged(const AcknowledgedFrame& acknowledged);

// Parses one frame. Returns InvalidArgument when `bytes` is not exactly one frame of exactly one
// kind. A chunk is also refused when a known field has a wrong wire type, when SetHeader
// refuses its numbers, or when `elems` elements cannot take as many bytes as its payload has,
// unless that is empty. Other rules (unknown fields, order, repetition) are protobuf's. A chunk's
// payload takes over `bytes`, which is left empty.
absl::StatusOr<ParsedFrame> ParseFrame(grpc::ByteBuffer&& bytes);

}  // namespace thalweg
