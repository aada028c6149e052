// What tests of frames need: protobuf's view of a chunk, and bytes as buffers and back.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "core/base/clock.h"
#include "server/transport/wire/frame_codec.h"
#include "thalweg/v1/exchange.pb.h"

namespace thalweg {

inline uint64_t NumberOf(const Place& place) {
  if (place.kind == Place::Kind::kOne) return uint64_t{place.node} + 2;
  return place.kind == Place::Kind::kAll ? 0 : 1;
}

inline v1::Frame ToProto(const ChunkFrame& chunk) {
  v1::Frame frame;
  v1::Chunk& proto = *frame.mutable_chunk();
  const ChunkHeader& header = chunk.header;
  proto.set_epoch(header.epoch);
  proto.set_bucket_index(header.id.bucket.index);
  proto.set_bucket_generation(header.id.bucket.generation);
  proto.set_chunk(header.id.chunk);
  proto.set_round(header.id.round);
  proto.set_wire(static_cast<v1::WireFormat>(header.wire));
  proto.set_elems(header.elems);
  proto.set_workers(header.workers);
  proto.set_nonfinite_elems(header.nonfinite_elems);
  proto.set_part(header.id.bucket.part);
  proto.set_loss_scale(header.loss_scale);
  proto.set_acknowledged(header.acknowledged);
  proto.set_kind(static_cast<v1::ChunkKind>(header.kind));
  proto.set_group(header.group);
  proto.set_from(NumberOf(header.collective.from));
  proto.set_to(NumberOf(header.collective.to));
  proto.set_fold(static_cast<v1::Fold>(header.collective.fold));
  proto.set_timeout_ms(static_cast<uint64_t>((ToNanos(header.timeout) + 999'999) / 1'000'000));
  proto.set_settled(header.settled);
  proto.set_settings(header.settings);
  for (const auto& piece : chunk.payload.pieces) {
    proto.mutable_payload()->append(reinterpret_cast<const char*>(piece.data()), piece.size());
  }
  return frame;
}

inline std::string Flatten(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  EXPECT_TRUE(buffer.Dump(&slices).ok());
  std::string bytes;
  for (const auto& s : slices) bytes.append(reinterpret_cast<const char*>(s.begin()), s.size());
  return bytes;
}

// Returns `bytes` as a buffer that is cut at every position in `cuts` (ascending).
inline grpc::ByteBuffer Sliced(const std::string& bytes, const std::vector<size_t>& cuts = {}) {
  std::vector<grpc::Slice> slices;
  size_t begin = 0;
  for (size_t cut : cuts) {
    slices.emplace_back(bytes.substr(begin, cut - begin));
    begin = cut;
  }
  slices.emplace_back(bytes.substr(begin));
  return grpc::ByteBuffer(slices.data(), slices.size());
}

inline absl::Status WhyRefused(const std::string& bytes) {
  return ParseFrame(Sliced(bytes)).status();
}

inline ChunkFrame MustParseChunk(const grpc::ByteBuffer& buffer) {
  auto parsed = ParseFrame(grpc::ByteBuffer(buffer));
  EXPECT_TRUE(parsed.ok()) << parsed.status();
  if (!parsed.ok() || !std::holds_alternative<ChunkFrame>(*parsed)) return {};
  return std::get<ChunkFrame>(*parsed);
}

inline void AppendVarint(uint64_t value, std::string* out) {
  for (; value >= 128; value >>= 7) out->push_back(static_cast<char>(value % 128 + 128));
  out->push_back(static_cast<char>(value));
}

inline std::string Wrapped(const std::string& chunk_fields) {
  std::string frame = "\x12";
  AppendVarint(chunk_fields.size(), &frame);
  return frame + chunk_fields;
}

}  // namespace thalweg
