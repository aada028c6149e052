// The exchange between a node and one aggregator shard, as both see it, without any transport:
// server/transport carries these calls over gRPC, embedded mode makes them directly.
//
//   node                                   shard
//    │ MeasureLink ──────────────────────▶
//    │ Join(events) ─────────────────────▶ waits until every node of the job has joined
//    │ ◀────────────────── Member, Terms
//    │ Register ─────────────────────────▶ refuses a layout that differs between nodes
//    │ Contribute (per chunk) ───────────▶ holds it; the last one of a round makes it fold
//    │ ◀────────────────── events.OnResult to every node, the same bytes
//    │ Leave ────────────────────────────▶
//
// A shard keeps everything in memory. When it has been restarted, its nodes join again with
// JoinRequest::resume, announce their buckets, Supply the results that the shard wants of them, and
// repeat the contributions that have no result (server/shards/returning_shard.h).
#pragma once

#include <memory>
#include <stop_token>

#include "absl/status/statusor.h"
#include "core/base/clock.h"
#include "core/exchange/events.h"
#include "core/exchange/join.h"
#include "core/exchange/link_speed.h"
#include "core/exchange/member.h"

namespace thalweg {

// A Shard is one aggregator shard as a node sees it. The aggregator itself and the transport's
// client side implement it. Thread-safe. It must outlive its members, or at least their leaving.
class Shard {
 public:
  virtual ~Shard() = default;

  // Measures the link to this shard, which takes some tens of milliseconds, unless it has done so
  // some minutes ago beside as many nodes; `num_nodes` do it at the same time. Errors: Unavailable
  // (no aggregator there), DeadlineExceeded, Cancelled (by `stop`).
  virtual absl::StatusOr<LinkSpeed> MeasureLink(uint32_t num_nodes, TimePoint deadline,
                                                const std::stop_token& stop) = 0;

  // Blocks until all nodes of the job have joined, or `deadline`. `events`, not null, hears what
  // the shard says to the member; its ownership is shared because the shard may be about to call
  // it while the member leaves. Errors: InvalidArgument (the nodes disagree about the job),
  // AlreadyExists (that node has joined), DeadlineExceeded (names the missing nodes), Unavailable
  // (no aggregator there), PermissionDenied (the identity has not been proved, or the shard does
  // not serve the job, or not to this peer), ResourceExhausted (the shard or the peer's tenant has
  // too many jobs, or too little memory), Cancelled (by the request's `stop`).
  virtual absl::StatusOr<std::unique_ptr<Member>> Join(const JoinRequest& request,
                                                       std::shared_ptr<MemberEvents> events,
                                                       TimePoint deadline) = 0;

  // Instead of Join: takes the place up that an earlier process of this node had. The request,
  // which otherwise is as it was then, need not name rounds. All other nodes of the job, which must
  // have a secret unless it is of this node alone, return to the shard too. Errors as Join;
  // Unimplemented: the node does not return to shards.
  virtual absl::StatusOr<std::unique_ptr<Member>> TakeUp(
      const JoinRequest& /*request*/, const KeptSeat& /*kept*/,
      const std::shared_ptr<MemberEvents>& /*events*/, TimePoint /*deadline*/) {
    return absl::UnimplementedError("this node does not return to shards (--reconnect is 0)");
  }
};

}  // namespace thalweg
