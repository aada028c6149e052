#include "server/transport/wire/frame_codec.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "grpcpp/support/proto_buffer_reader.h"
#include "server/transport/wire/small_frames.h"
#include "server/transport/wire/wire_types.h"
#include "thalweg/v1/exchange.pb.h"

namespace thalweg {
namespace {

constexpr uint32_t Tag(int field, WireType type) {
  return static_cast<uint32_t>(field) << 3 | type;
}
constexpr uint32_t kChunkTag = Tag(v1::Frame::kChunkFieldNumber, kLengthDelimited);
constexpr uint32_t kPayloadField = v1::Chunk::kPayloadFieldNumber;

constexpr uint32_t kLossScaleField = v1::Chunk::kLossScaleFieldNumber;

constexpr size_t kMaxVarintBytes = 10;
// Tags of field numbers from 16 on take two bytes.
constexpr size_t kMaxTagBytes = 2;
// This bound counts every scalar with its tag, and the tags and lengths of payload and chunk.
constexpr size_t kMaxHeadBytes = (kScalarNames.size() + 2) * (kMaxTagBytes + kMaxVarintBytes);

// A Head holds the bytes before a payload. They are written from the end, because a length precedes
// what it counts.
class Head {
 public:
  void PrependVarint(uint64_t value) {
    if (value < 0x80) {
      bytes_[--begin_] = static_cast<uint8_t>(value);
      return;
    }
    std::array<uint8_t, kMaxVarintBytes> bytes;
    size_t size = 0;
    for (; value >= 0x80; value >>= 7) bytes[size++] = static_cast<uint8_t>(value | 0x80);
    bytes[size++] = static_cast<uint8_t>(value);
    begin_ -= size;
    std::copy_n(bytes.begin(), size, bytes_.begin() + begin_);
  }

  void PrependFixed64(uint64_t value) {
    for (int shift = 56; shift >= 0; shift -= 8)
      bytes_[--begin_] = static_cast<uint8_t>(value >> shift);
  }

  size_t size() const { return bytes_.size() - begin_; }
  grpc::Slice Copy() const { return {bytes_.data() + begin_, size()}; }

 private:
  std::array<uint8_t, kMaxHeadBytes> bytes_;
  size_t begin_ = kMaxHeadBytes;
};

// A Lease keeps a payload's pieces alive until gRPC has released the last of them.
class Lease {
 public:
  Lease(std::shared_ptr<const void> owner, size_t pieces)
      : owner_(std::move(owner)), pieces_(pieces) {}

  // gRPC calls this to release a piece.
  static void Release(void* lease) {
    auto* held = static_cast<Lease*>(lease);
    if (held->pieces_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      std::unique_ptr<Lease> last(held);
    }
  }

 private:
  std::shared_ptr<const void> owner_;
  // Release and acquire order every use of the pieces before the owner is destroyed.
  std::atomic<size_t> pieces_;
};

// A Cursor reads forward through a buffer's slices as if they were contiguous.
class Cursor {
 public:
  // `bytes` must stay where it is while the cursor or anything returned by Take is in use.
  explicit Cursor(grpc::ByteBuffer& bytes) : slices_(&bytes), remaining_(bytes.Length()) {}

  uint64_t remaining() const { return remaining_; }

  // Returns false when the bytes end too early or the varint is longer than `max_bytes`. Bits
  // beyond 64 are dropped, as protobuf does.
  bool ReadVarint(size_t max_bytes, uint64_t* value) {
    *value = 0;
    for (size_t i = 0; i < max_bytes && remaining_ > 0; ++i) {
      const auto byte = static_cast<uint8_t>(Step(1).front());
      *value |= uint64_t{byte & 0x7fu} << (7 * i);
      if (byte < 0x80) return true;
    }
    return false;
  }

  // Returns false when fewer than 8 bytes remain.
  bool ReadFixed64(uint64_t* value) {
    if (remaining_ < 8) return false;
    *value = 0;
    for (int shift = 0; shift < 64; shift += 8) {
      *value |= uint64_t{static_cast<uint8_t>(Step(1).front())} << shift;
    }
    return true;
  }

  // Reads a field's tag; field numbers begin at 1.
  bool ReadTag(uint32_t* tag) {
    uint64_t value;
    if (!ReadVarint(5, &value)) return false;
    *tag = static_cast<uint32_t>(value);
    return *tag >> 3 != 0;
  }

  // Reads the length of a field; returns false unless that many bytes remain.
  bool ReadLength(uint64_t* length) { return ReadVarint(5, length) && *length <= remaining_; }

  bool Skip(uint64_t bytes) {
    if (bytes > remaining_) return false;
    while (bytes > 0) bytes -= Step(bytes).size();
    return true;
  }

  // Returns the next `bytes` as views of the slices. Requires bytes <= remaining().
  std::vector<std::span<const std::byte>> Take(uint64_t bytes) {
    std::vector<std::span<const std::byte>> pieces;
    pieces.reserve(bytes / GRPC_TCP_DEFAULT_READ_SLICE_SIZE + 2);
    while (bytes > 0) {
      pieces.push_back(Step(bytes));
      bytes -= pieces.back().size();
    }
    return pieces;
  }

 private:
  // Consumes and returns the rest of the current slice, at most `limit` bytes. Requires 0 < limit
  // <= remaining().
  std::span<const std::byte> Step(uint64_t limit) {
    while (slice_.empty()) {
      const void* data = nullptr;
      int size = 0;
      slices_.Next(&data, &size);
      slice_ = {static_cast<const std::byte*>(data), static_cast<size_t>(size)};
    }
    const auto step = slice_.first(std::min<uint64_t>(slice_.size(), limit));
    slice_ = slice_.subspan(step.size());
    remaining_ -= step.size();
    return step;
  }

  grpc::ProtoBufferReader slices_;  // refers to the buffer's slices without counting references
  std::span<const std::byte> slice_;
  uint64_t remaining_;
};

absl::Status Malformed(const Cursor& in, const std::string& what) {
  return absl::InvalidArgumentError(
      absl::StrCat("malformed frame, ", in.remaining(), " bytes before its end: ", what));
}

absl::Status SkipUnknown(uint32_t tag, Cursor* in) {
  const uint32_t field = tag >> 3;
  uint64_t value = 0;
  bool complete = false;
  switch (tag & 7) {
    case kVarint:
      complete = in->ReadVarint(10, &value);
      break;
    case kFixed64:
      complete = in->Skip(8);
      break;
    case kFixed32:
      complete = in->Skip(4);
      break;
    case kLengthDelimited:
      complete = in->ReadLength(&value) && in->Skip(value);
      break;
    default:
      return Malformed(*in, absl::StrCat("field ", field, " has wire type ", tag & 7,
                                         ", expected 0, 1, 2 or 5"));
  }
  if (!complete) return Malformed(*in, absl::StrCat("field ", field, " is cut off or too long"));
  return absl::OkStatus();
}

absl::Status ParseField(Cursor* in, Scalars* scalars, Payload* payload) {
  uint32_t tag;
  if (!in->ReadTag(&tag)) return Malformed(*in, "expected a field, got no valid tag");
  const uint32_t field = tag >> 3;
  const uint32_t type = tag & 7;
  const bool is_payload = field == kPayloadField;
  if (!is_payload && field >= scalars->size()) return SkipUnknown(tag, in);

  const char* name = is_payload ? "payload" : kScalarNames[field];
  const uint32_t expected = is_payload                 ? kLengthDelimited
                            : field == kLossScaleField ? kFixed64
                                                       : kVarint;
  if (type != expected) {
    return Malformed(*in, absl::StrCat(name, " has wire type ", type, ", expected ", expected));
  }
  if (field == kLossScaleField) {
    if (in->ReadFixed64(&(*scalars)[field])) return absl::OkStatus();
    return Malformed(*in, absl::StrCat(name, " is cut off"));
  }
  if (!is_payload) {
    if (in->ReadVarint(10, &(*scalars)[field])) return absl::OkStatus();
    return Malformed(*in, absl::StrCat(name, " is cut off or longer than 10 bytes"));
  }
  uint64_t length;
  if (!in->ReadLength(&length)) return Malformed(*in, "payload is cut off");
  payload->pieces = in->Take(length);
  return absl::OkStatus();
}

// Parses a chunk without its payload's owner. `in` is positioned after the chunk's tag.
absl::Status ParseChunk(Cursor& in, ChunkFrame* frame) {
  uint64_t length;
  if (!in.ReadLength(&length) || length != in.remaining()) {
    return Malformed(in, "a chunk's length must be that of the rest of the frame");
  }
  Scalars scalars{};
  while (in.remaining() > 0) {
    THALWEG_RETURN_IF_ERROR(ParseField(&in, &scalars, &frame->payload));
  }
  const ChunkHeader& header = frame->header;
  THALWEG_RETURN_IF_ERROR(SetHeader(scalars, &frame->header));
  const size_t bytes = frame->payload.SizeBytes();
  if (bytes > 0 && !IsPayloadSize(header.wire, header.elems, bytes)) {
    return absl::InvalidArgumentError(absl::StrCat("malformed frame: the payload has ", bytes,
                                                   " bytes, expected ", header.elems,
                                                   " elements in ", Name(header.wire)));
  }
  return absl::OkStatus();
}

// As above, in the buffer that `owner` keeps alive. The frame is made where it is returned: copying
// it would take as long as parsing does.
absl::StatusOr<ParsedFrame> ParseChunk(Cursor& in, std::shared_ptr<const void> owner) {
  absl::StatusOr<ParsedFrame> parsed(absl::in_place, std::in_place_type<ChunkFrame>);
  auto& frame = std::get<ChunkFrame>(*parsed);
  const absl::Status status = ParseChunk(in, &frame);
  frame.payload.owner = std::move(owner);
  if (!status.ok()) parsed = status;
  return parsed;
}

absl::StatusOr<ParsedFrame> ParseSmall(Cursor& in) {
  if (in.remaining() > kMaxSmallFrameBytes) {
    return Malformed(
        in, absl::StrCat("a frame other than a chunk has ", kMaxSmallFrameBytes, " bytes at most"));
  }
  std::string bytes;
  for (const auto& piece : in.Take(in.remaining())) {
    bytes.append(reinterpret_cast<const char*>(piece.data()), piece.size());
  }
  return ParseSmallFrame(bytes);
}

using Slices = absl::InlinedVector<grpc::Slice, 8>;

// Appends slices that refer to the payload's pieces and keep its owner alive while gRPC holds them.
// Requires a non-empty payload.
void AppendPieces(const Payload& payload, Slices* slices) {
  size_t count = 0;
  for (const auto& piece : payload.pieces) count += piece.empty() ? 0 : 1;
  slices->reserve(slices->size() + count);
  auto lease = std::make_unique<Lease>(payload.owner, count);
  for (const auto& piece : payload.pieces) {
    if (piece.empty()) continue;
    // gRPC's slices are not const-correct: gRPC only reads what it sends.
    void* data = const_cast<std::byte*>(piece.data());
    slices->emplace_back(data, piece.size(), &Lease::Release, lease.get());
  }
  (void)lease.release();  // the slices own it now
}

}  // namespace

grpc::ByteBuffer EncodeChunk(const ChunkHeader& header, const Payload& payload) {
  const Scalars scalars = ScalarsOf(header);
  const size_t payload_bytes = payload.SizeBytes();
  Head head;
  if (payload_bytes > 0) {
    head.PrependVarint(payload_bytes);
    head.PrependVarint(Tag(kPayloadField, kLengthDelimited));
  }
  for (size_t field = scalars.size() - 1; field > 0; --field) {
    if (scalars[field] == 0) continue;  // proto3 omits defaults
    const bool is_double = field == kLossScaleField;
    if (is_double) {
      head.PrependFixed64(scalars[field]);
    } else {
      head.PrependVarint(scalars[field]);
    }
    head.PrependVarint(Tag(static_cast<int>(field), is_double ? kFixed64 : kVarint));
  }
  head.PrependVarint(head.size() + payload_bytes);
  head.PrependVarint(kChunkTag);

  Slices slices;
  slices.push_back(head.Copy());
  if (payload_bytes > 0) AppendPieces(payload, &slices);
  return grpc::ByteBuffer(slices.data(), slices.size());
}

absl::StatusOr<ParsedFrame> ParseFrame(grpc::ByteBuffer&& bytes) {
  if (!bytes.Valid()) return absl::InvalidArgumentError("malformed frame: there is no message");
  // The payload shares this buffer: its pieces point into the buffer's slices, and short slices lie
  // in the ByteBuffer object itself, which therefore must not move.
  const auto owner = std::make_shared<grpc::ByteBuffer>();
  owner->Swap(&bytes);
  Cursor in(*owner);
  uint32_t tag;
  if (in.ReadTag(&tag) && tag == kChunkTag) return ParseChunk(in, owner);
  Cursor start(*owner);
  return ParseSmall(start);
}

}  // namespace thalweg
