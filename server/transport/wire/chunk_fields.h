// This header says which fields a chunk frame has: what they are to nodes and shards, and as
// numbers of exchange.proto. All functions are stateless.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "core/base/clock.h"
#include "core/base/payload.h"
#include "core/exchange/rounds.h"

namespace thalweg {

// Nodes send contributions, and results that the shard wants of them; shards send results.
enum class ChunkKind : uint8_t { kContribution = 0, kResult = 1 };

// A ChunkHeader is a Contribution or a RoundResult without its payload. Fields that only the other
// kind has are at their defaults.
struct ChunkHeader {
  RoundId id;
  uint64_t epoch = 0;
  WireFormat wire = WireFormat::kFloat32;
  uint64_t elems = 0;
  uint32_t workers = 0;
  uint64_t nonfinite_elems = 0;
  double loss_scale = kUnknownLossScale;
  // The number of chunk frames that the sender has received on this stream, all incarnations
  // together.
  uint64_t acknowledged = 0;
  ChunkKind kind = ChunkKind::kContribution;
  uint32_t group = 0;
  Collective collective = {};
  Duration timeout{};  // crosses the wire as ToMillis(timeout)
  uint64_t settled = 0;
  uint64_t settings = 0;

  bool operator==(const ChunkHeader&) const = default;
};

// Nothing in them is acknowledged.
ChunkHeader HeaderOf(const Contribution& contribution);
ChunkHeader HeaderOf(const RoundResult& result);

Contribution ToContribution(const ChunkHeader& header, Payload payload);
RoundResult ToResult(const ChunkHeader& header, Payload payload);

// kMaxRoundPatience is the longest timeout of a round that crosses the wire; a Duration holds it.
inline constexpr Duration kMaxRoundPatience = std::chrono::hours(24 * 3650);

// Returns whole milliseconds, rounded up: at least 0, at most kMaxRoundPatience.
uint64_t ToMillis(Duration timeout);

// These are the names of Chunk's fields by number, without the payload. In frames, loss_scale is a
// double, and all others are varints.
inline constexpr std::array<const char*, 21> kScalarNames = {"",
                                                             "epoch",
                                                             "bucket_index",
                                                             "bucket_generation",
                                                             "chunk",
                                                             "round",
                                                             "wire",
                                                             "elems",
                                                             "workers",
                                                             "nonfinite_elems",
                                                             "part",
                                                             "loss_scale",
                                                             "acknowledged",
                                                             "kind",
                                                             "group",
                                                             "from",
                                                             "to",
                                                             "fold",
                                                             "timeout_ms",
                                                             "settled",
                                                             "settings"};
// Scalars are those fields' values by number, the double as its bits.
using Scalars = std::array<uint64_t, kScalarNames.size()>;

Scalars ScalarsOf(const ChunkHeader& header);

// Sets the header that has these values, which come from outside. Returns InvalidArgument when the
// wire format, the kind, the fold or one of the places is unknown, or the timeout is too long. The
// meaning of other numbers is not checked, nor whether there is such a collective.
absl::Status SetHeader(const Scalars& scalars, ChunkHeader* header);

}  // namespace thalweg
