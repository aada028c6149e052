// Random chunks, for tests of frames.
#pragma once

#include <chrono>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <memory>
#include <random>
#include <span>
#include <string>

#include "server/transport/wire/frame_codec.h"

namespace thalweg {

using Random = std::mt19937_64;

inline constexpr uint64_t kMaxTimeoutMillis = uint64_t{10} * 365 * 24 * 3600 * 1000;

// Returns values of every varint length.
inline uint64_t RandomValue(Random& random) { return random() >> (random() % 64); }

inline std::string RandomBytes(Random& random, size_t size) {
  std::string bytes(size, '\0');
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

inline constexpr WireFormat kFormats[] = {
    WireFormat::kFloat32, WireFormat::kFloat16, WireFormat::kBFloat16, WireFormat::kFloat64,
    WireFormat::kInt8,    WireFormat::kOneBit,  WireFormat::kTopK};

// Returns a valid payload length for such a chunk.
inline size_t PayloadBytes(const ChunkHeader& header, Random& random) {
  const size_t most = MaxEncodedBytes(header.wire, header.elems);
  return header.wire == WireFormat::kTopK ? 4 + random() % (most - 3) : most;
}

inline Place RandomPlace(Random& random) {
  const auto node = static_cast<uint32_t>(RandomValue(random));
  return random() % 2 == 0 ? Place::One(node) : random() % 2 == 0 ? Place::All() : Place::None();
}

// Sets what says what the round does; the values need not fit together.
inline void SetRandomRound(Random& random, ChunkHeader* header) {
  header->group = static_cast<uint32_t>(RandomValue(random));
  header->collective = {RandomPlace(random), RandomPlace(random), static_cast<Fold>(random() % 9)};
  header->timeout = std::chrono::milliseconds(random() % kMaxTimeoutMillis >> random() % 40);
  header->settled = RandomValue(random);
  header->settings = RandomValue(random);
  if (random() % 2 == 0) header->id.bucket = OneShotsOf(header->group);
}

inline ChunkFrame RandomChunk(Random& random, uint64_t elems, WireFormat wire) {
  ChunkFrame chunk;
  ChunkHeader& header = chunk.header;
  header.id.bucket = {static_cast<uint32_t>(RandomValue(random)),
                      static_cast<uint32_t>(RandomValue(random))};
  header.id.bucket.part = random() % kMaxParts;
  header.id.chunk = static_cast<uint32_t>(RandomValue(random));
  header.id.round = RandomValue(random);
  header.epoch = random() % 8 == 0 ? 0 : RandomValue(random);
  header.wire = wire;
  header.elems = elems;
  header.workers = static_cast<uint32_t>(RandomValue(random));
  header.nonfinite_elems = RandomValue(random);
  if (random() % 2 == 0) header.acknowledged = RandomValue(random);
  if (random() % 2 == 0) header.loss_scale = std::ldexp(1.0 + random() % 2, random() % 64 - 32);
  header.kind = static_cast<ChunkKind>(random() % 2);
  if (random() % 2 == 0) SetRandomRound(random, &header);
  auto data =
      std::make_shared<std::string>(RandomBytes(random, PayloadBytes(chunk.header, random)));
  const auto bytes = std::as_bytes(std::span(*data));
  chunk.payload.owner = data;
  const size_t cut = bytes.empty() ? 0 : random() % bytes.size();
  chunk.payload.pieces = {bytes.first(cut), bytes.subspan(cut)};
  return chunk;
}

inline ChunkFrame RandomChunk(Random& random, uint64_t elems) {
  return RandomChunk(random, elems, kFormats[random() % std::size(kFormats)]);
}

}  // namespace thalweg
