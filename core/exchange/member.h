// A Member is one node's place in a job on one shard: what it may do once it has joined.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/clock.h"
#include "core/base/host_clock.h"
#include "core/base/snapshots.h"
#include "core/base/update.h"
#include "core/exchange/collective.h"
#include "core/exchange/join.h"
#include "core/exchange/rounds.h"

namespace thalweg {

// A LostNode is one without which its job goes on; both texts are for people.
struct LostNode {
  std::string node;  // "node 1 (host)"
  std::string why;
  bool operator==(const LostNode&) const = default;
};

// A Pulse is what a shard answers a sign of life with.
struct Pulse {
  ClockReading clock;          // the shard's
  std::vector<LostNode> lost;  // all so far
};

// A Member is thread-safe. Its destructor leaves; that has no further effect after Leave, which
// ends everything else too: a Member that has left touches the shard no more and answers all calls
// with an error.
class Member {
 public:
  virtual ~Member() = default;

  virtual const Terms& terms() const = 0;

  // Announces a bucket; a new generation replaces the old one. Blocks for one round trip at most.
  // InvalidArgument names both nodes and the tensor when another node announced something else.
  virtual absl::Status Register(const BucketAnnouncement& bucket, TimePoint deadline) = 0;

  // Declares a group, before the first contribution that names it; every node of it declares the
  // same. Blocks for one round trip at most. InvalidArgument: there can be no such group, or
  // another node has declared it otherwise. ResourceExhausted: the shard has no memory for its
  // window.
  virtual absl::Status MakeGroup(const Group& group, TimePoint deadline) = 0;

  // Contributes without blocking. Repeating a contribution is harmless: it counts once.
  virtual absl::Status Contribute(Contribution contribution) = 0;

  // Gives the shard, without blocking, a result that Terms::wanted names. Nodes that repeat their
  // contribution to that round get it.
  virtual absl::Status Supply(RoundResult result) = 0;

  // Read or write, for a checkpoint, what the shard's encoding of a chunk's results has left out so
  // far and will add to the next one (docs/codecs.md), in true units: without the loss scale that
  // contributions name. The values have one element for each of the chunk; an empty result means
  // that the shard has no residual yet, which is the same as zeros. Both apply to parts in a format
  // that HasResidual. A node may read and write while it has the results of all rounds that it has
  // contributed to: the residual then belongs to the last of them. Writing replaces the residual;
  // one node, the first, does it for all. Errors change nothing and do not fail the job:
  // FailedPrecondition (the part is not registered in this layout), InvalidArgument (no such chunk,
  // another format, a number of values that differs from the chunk's elements, or a value that is
  // not finite).
  virtual absl::StatusOr<std::vector<float>> ReadResidual(BucketId bucket, uint32_t chunk,
                                                          TimePoint deadline) = 0;
  virtual absl::Status WriteResidual(BucketId bucket, uint32_t chunk, std::span<const float> values,
                                     TimePoint deadline) = 0;

  // These are for buckets with an update; see there (core/base/update.h). Settings are numbered
  // from 1; every node gives those that its contributions will name, before. InvalidArgument: nodes
  // differ, or as Validate says. FailedPrecondition: so old a number is not kept. Then the job
  // fails.
  virtual absl::Status SetSettings(uint64_t number, const UpdateStep& step, TimePoint deadline) = 0;
  // Read or write a slice of a chunk's weights, as residuals are read and written. A moment may be
  // empty, which is the same as zeros, and parameters that are read are empty if they have never
  // been written. One node writes them before the first contributions of all.
  virtual absl::StatusOr<WeightsSlice> ReadWeights(BucketId bucket, uint32_t chunk, uint32_t slice,
                                                   TimePoint deadline) = 0;
  virtual absl::Status WriteWeights(BucketId bucket, uint32_t chunk, uint32_t slice,
                                    WeightsSlice weights, TimePoint deadline) = 0;

  // Takes, restores or lists snapshots of the weights; see SnapshotCall. Repeating a call is
  // harmless. FailedPrecondition: the shard keeps none, a restored one is of another job's weights,
  // or another one is being written. DataLoss: the snapshot is damaged, or the shard has been
  // restarted and has no weights to take one of. NotFound ends the membership, so that there is no
  // such snapshot is a FailedPrecondition.
  virtual absl::StatusOr<SnapshotReport> Snapshots(const SnapshotCall& call,
                                                   TimePoint deadline) = 0;

  // Reports that the node is alive; a node that is silent for its lease is treated as lost.
  virtual absl::StatusOr<Pulse> Heartbeat(TimePoint deadline) = 0;

  // Ends the membership. With OK the node is done: rounds that still need it fail with its name.
  // Otherwise the whole job fails at once, for `reason`. Idempotent.
  virtual void Leave(const absl::Status& reason) = 0;
};

// Heartbeats are at least this far apart, and a lease lasts at least that long.
inline constexpr Duration kHeartbeatInterval = std::chrono::seconds(2);
inline constexpr Duration kLease = std::chrono::seconds(15);

// Returns the interval at which each node of a job sends a heartbeat to each of its shards. A node
// sends 16 a second at most, and receives as many where every node hosts a shard. Beyond 64 shards
// it sends more, so that the lease stays short.
constexpr Duration HeartbeatInterval(uint32_t shards) {
  constexpr Duration kOfEachShard = std::chrono::microseconds(62'500);
  return std::clamp(shards * kOfEachShard, kHeartbeatInterval, 2 * kHeartbeatInterval);
}

// Returns the lease of a node of a job with so many shards whose connection may be away for
// `grace`: a shard treats the node as lost that it has not heard of for so long. It begins an
// interval before the break. When the network is back, gRPC may wait 2.4 s before it tries to
// connect, and the next heartbeat comes an interval later.
constexpr Duration LeaseFor(Duration grace, uint32_t shards) {
  constexpr Duration kConnectTime = std::chrono::milliseconds(2400);
  return std::max(kLease, grace + 2 * HeartbeatInterval(shards) + kConnectTime);
}

}  // namespace thalweg
