// HeldRound is an open round: what its first contribution says of it, and what it holds.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "core/base/clock.h"
#include "core/exchange/rounds.h"
#include "server/round/complete_round.h"
#include "server/round/round_group.h"

namespace thalweg {

// A HeldRound is thread-compatible. Seats are those of its RoundGroup.
class HeldRound {
 public:
  // The round that `first`, of `node`, opens, in a group of `seats` nodes. It holds nothing yet.
  // With `counts`, windows count what it holds.
  HeldRound(uint32_t node, const Contribution& first, size_t seats, Duration timeout, TimePoint now,
            bool counts = true);

  // Returns InvalidArgument that names both nodes when a contribution of `node` differs from the
  // first in group, collective, format or elements.
  absl::Status CheckSame(uint32_t node, const Contribution& contribution) const;
  // Takes what CheckSame allows.
  void Hold(size_t seat, Contribution contribution);
  bool Holds(size_t seat) const { return held_[seat].has_value(); }
  size_t BytesOf(size_t seat) const { return held_[seat] ? held_[seat]->payload.SizeBytes() : 0; }
  // It still waits, after the contribution that came at `now`.
  void Wait(TimePoint now) { latest_ = now; }
  // From now on at the latest a node waits until it is complete.
  void Await(TimePoint now) { awaited_ = std::min(awaited_.value_or(now), now); }

  // Returns whether it holds something of all members that are not lost.
  bool IsComplete(const RoundGroup& group) const;
  // Says whether only this node, of which nothing is held, has what the round passes on.
  bool Needs(uint32_t node) const { return collective_.from == Place::One(node); }
  // Returns the members that are missing, ascending.
  std::vector<uint32_t> Missing(const RoundGroup& group) const;
  // Takes everything out of it.
  CompleteRound Take(const RoundId& id, const RoundGroup& group, TimePoint now);

  uint32_t group() const { return group_; }
  TimePoint opened() const { return opened_; }
  // Returns since when a node has waited for it; `now`: none does.
  TimePoint awaited_since(TimePoint now) const { return awaited_.value_or(now); }
  bool counts() const { return counts_; }
  Duration timeout() const { return timeout_; }

 private:
  // A Share is what one node has contributed.
  struct Share {
    Payload payload;
    double loss_scale = kUnknownLossScale;
  };

  const uint32_t first_;  // the node that opened it
  const uint32_t group_;
  const Collective collective_;
  const uint64_t settings_;
  const WireFormat wire_;
  const uint64_t elems_;
  const Duration timeout_;
  const TimePoint opened_;
  const bool counts_;
  std::optional<TimePoint> awaited_;
  TimePoint latest_;  // when its latest contribution came
  uint32_t count_ = 0;
  std::vector<std::optional<Share>> held_;  // by seat
};

}  // namespace thalweg
