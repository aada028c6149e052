// Frames of exchange.proto to and from bytes. Chunk frames are written and read by hand, so that
// their payload is never copied: what is sent refers to the caller's memory, what was received is
// read where it lies. docs/wire.md describes the bytes.
//
// Stateless; all functions may be called from any thread.
#pragma once

#include <cstdint>
#include <variant>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/exchange.h"
#include "core/base/protocol.h"
#include "grpcpp/support/byte_buffer.h"

namespace thalweg {

// The largest payload of a chunk.
inline constexpr size_t kMaxPayloadBytes = 2 * kMaxChunkBytes;
// A topk chunk in which every element crosses is the one that encoding makes longer. Float32 chunks
// alone are lossy.
static_assert(kMaxPayloadBytes >=
              MaxEncodedBytes(WireFormat::kTopK, kMaxChunkBytes / SizeOf(DType::kFloat32)));
// The largest message either side accepts; gRPC refuses a longer one before it is buffered.
inline constexpr size_t kMaxFrameBytes = kMaxPayloadBytes + 4096;
// How many streams a node may open to one shard.
inline constexpr uint32_t kMaxStreams = 16;
// The largest frame of another kind than chunk, which is copied to be parsed.
inline constexpr size_t kMaxSmallFrameBytes = 64 << 10;

// A Contribution or a RoundResult without its payload; the last two fields are 0 on the way up.
struct ChunkHeader {
  RoundId id;
  uint64_t epoch = 0;
  WireFormat wire = WireFormat::kFloat32;
  uint64_t elems = 0;
  uint32_t workers = 0;
  uint64_t nonfinite_elems = 0;

  bool operator==(const ChunkHeader&) const = default;
};

struct OpenFrame {
  SessionToken token = 0;
  uint32_t stream = 0;
  uint32_t num_streams = 1;
};
struct ChunkFrame {
  ChunkHeader header;
  Payload payload;  // refers to the received slices and keeps them
};
struct FailureFrame {
  absl::Status why;  // never OK
};
using ParsedFrame = std::variant<OpenFrame, ChunkFrame, FailureFrame>;

grpc::ByteBuffer EncodeOpen(const OpenFrame& open);
// The buffer keeps `payload.owner` until gRPC has sent it.
grpc::ByteBuffer EncodeChunk(const ChunkHeader& header, const Payload& payload);
grpc::ByteBuffer EncodeFailure(const absl::Status& why);

// InvalidArgument when `bytes` is anything else than one frame of exactly one kind. A chunk is
// refused besides when a known field has a foreign wire type, when its wire format is none of ours,
// or when no `elems` elements take as many bytes as the payload has. Other rules (unknown fields,
// order, repetition) are protobuf's. What the numbers mean is not looked at. A chunk's payload
// keeps `bytes`, which is left empty.
absl::StatusOr<ParsedFrame> ParseFrame(grpc::ByteBuffer&& bytes);

}  // namespace thalweg
