// Rounds, as nodes and shards speak of them: a bucket is announced once, then each round of each of
// its chunks takes one contribution of every node and gives all of them the same result.
#pragma once

#include <compare>
#include <cstdint>
#include <vector>

#include "core/base/layout.h"
#include "core/base/loss_scale.h"
#include "core/base/payload.h"
#include "core/base/wire_format.h"

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
};

// A RoundId names one chunk of one round. Round numbers of a chunk start at 1 and have no gaps.
struct RoundId {
  BucketId bucket;
  uint32_t chunk = 0;
  uint64_t round = 0;

  auto operator<=>(const RoundId&) const = default;
};

// A Contribution is one node's share of a chunk: the mean over its workers, in wire format.
struct Contribution {
  RoundId id;
  uint64_t epoch = 0;
  WireFormat wire = WireFormat::kFloat32;
  uint64_t elems = 0;
  Payload payload;  // IsPayloadSize(wire, elems, …)
  // The loss scale that the node's gradients carry. Only in formats that HasResidual.
  double loss_scale = kUnknownLossScale;
};

// A RoundResult is the mean over all workers of the job, in wire format; all nodes get the same
// bytes.
struct RoundResult {
  RoundId id;
  uint64_t epoch = 0;
  WireFormat wire = WireFormat::kFloat32;
  uint64_t elems = 0;
  uint32_t workers = 0;          // number of workers in the mean
  uint64_t nonfinite_elems = 0;  // number of NaN and infinite elements
  Payload payload;
};

}  // namespace thalweg
