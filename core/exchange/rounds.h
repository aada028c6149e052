// Rounds, as nodes and shards speak of them: a bucket is announced once, then each round of each of
// its chunks takes one contribution of every node and gives all of them the same result.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/base/clock.h"
#include "core/base/layout.h"
#include "core/base/loss_scale.h"
#include "core/base/payload.h"
#include "core/base/update.h"
#include "core/base/wire_format.h"
#include "core/exchange/collective.h"

namespace thalweg {

// BucketRounds name one round for each of the first chunks of a bucket or part; 0 names none.
struct BucketRounds {
  BucketId bucket;
  std::vector<uint64_t> rounds;  // by chunk

  bool operator==(const BucketRounds&) const = default;
};

// A BucketAnnouncement describes a bucket, or a part of one, before its first contribution; all
// nodes must announce the same.
struct BucketAnnouncement {
  BucketId id;
  BucketLayout layout;
  WireFormat wire = WireFormat::kFloat32;  // format in which its chunks cross the network
  uint64_t placement = 0;                  // fingerprint of the placement of chunks on shards
  // One contribution of all its chunks represents this many bytes of gradient; used for statistics
  // only.
  uint64_t raw_bytes = 0;
  // Set where the shards keep the bucket's weights: results are their new values.
  std::optional<UpdateRule> update = std::nullopt;
};

// A RoundId names one chunk of one round. Round numbers of a chunk start at 1 and have no gaps.
struct RoundId {
  BucketId bucket;
  uint32_t chunk = 0;
  uint64_t round = 0;

  auto operator<=>(const RoundId&) const = default;
};

// A one-shot round belongs to no bucket: it has this in the bucket's place, and `round` is its
// sequence number in its group, from 1. Rounds of several numbers may be open at once, and nothing
// of them stays.
constexpr BucketId OneShotsOf(uint32_t group) { return {0xffff'ffff, group, 0}; }
constexpr bool IsOneShot(const RoundId& id) { return id.bucket.index == OneShotsOf(0).index; }
constexpr uint32_t GroupOf(const RoundId& one_shot) { return one_shot.bucket.generation; }

// A letter goes from one node to one other: a round of those two alone, which is complete with its
// only contribution. It has this in the bucket's place, and `round` is its number among the letters
// of its sender to that node, from 1. Its bytes are what nodes make of them.
constexpr BucketId LettersOf(uint32_t sender) { return {0xffff'fffe, sender, 0}; }
// How many bytes of letters for each node a shard holds together, and a sender must not exceed.
inline constexpr uint64_t kLetterBytesPerNode = 8 << 20;
constexpr bool IsLetter(const RoundId& id) { return id.bucket.index == LettersOf(0).index; }
constexpr uint32_t SenderOf(const RoundId& letter) { return letter.bucket.generation; }

// Returns "bucket 3 round 5 chunk 0", "collective 5 of group 2 chunk 0" or "letter 5 of node 1".
std::string ToString(const RoundId& id);

// A Contribution is one node's share of a chunk, in wire format: for a mean, that over its workers.
// All nodes of the round's group name the same group and collective, and the first one's timeout
// counts.
struct Contribution {
  RoundId id;
  uint64_t epoch = 0;
  WireFormat wire = WireFormat::kFloat32;
  uint64_t elems = 0;
  Payload payload;  // IsPayloadSize(wire, elems, …); empty if nothing is wanted from the node
  // The loss scale that the node's gradients carry. Only in formats that HasResidual.
  double loss_scale = kUnknownLossScale;
  uint32_t group = 0;
  Collective collective = {};
  Duration timeout{};  // how long the round waits for the last contribution; 0: the job's
  // This node has the results of all of the group's one-shot rounds up to this number.
  uint64_t settled = 0;
  // The number of the settings with which the bucket's weights are updated; 0 without an update. In
  // a one-shot round, what workers have called: see CallOf. All nodes name the same.
  uint64_t settings = 0;
};

// Says whether a contribution of `node` has as many bytes as its elements can take in its format,
// or none if its collective wants nothing from the node.
bool HasRightSize(uint32_t node, const Contribution& contribution);

// A RoundResult is what a round gives, in wire format; all nodes that get it get the same bytes.
struct RoundResult {
  RoundId id;
  uint64_t epoch = 0;
  WireFormat wire = WireFormat::kFloat32;
  uint64_t elems = 0;
  uint32_t workers = 0;          // number of workers whose values are in it
  uint64_t nonfinite_elems = 0;  // number of NaN and infinite elements
  Payload payload;
};

}  // namespace thalweg
