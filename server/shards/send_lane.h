// SendLane holds the chunks of one part number of a group's buckets that wait to go to the shards.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <vector>

#include "core/base/clock.h"
#include "core/exchange/rounds.h"
#include "server/base/metrics.h"
#include "server/shards/send_queue.h"

namespace thalweg {

// Thread-compatible. Every shard has a queue and a window of its own, so that one that owes a
// window of results holds up no other. The network divides a node's link by connections, not by
// what each of them has to carry, so the shard with the largest share would be done last, alone.
// Therefore a shard that is ahead gets one chunk at a time, until the others have caught up. A
// chunk's place tells that: in a shard's queue, the places of chunks that follow each other differ
// by all shares over that shard's, so queues that keep the same pace do their shares, whatever the
// order in which chunks came (an allreduce's come for all shards in turn, a reduce_scatter's for
// one shard after the other). A shard is ahead if its next chunk's place is larger than that of the
// oldest chunk that another one has not answered, by more than half of what all windows hold, or by
// more than all of it where windows are alike. There is always a
// chunk on its way to every shard for which one waits, so nodes whose chunks come in different
// orders at different shards do not wait for each other.
class SendLane {
 public:
  // Windows, shares, which are above 0, and `wait_seconds` (SendQueue) are by shard. Windows are
  // whole numbers, so that they are only roughly in proportion to the shares.
  SendLane(std::vector<uint32_t> windows, const std::vector<double>& shares,
           std::span<Counter* const> wait_seconds);

  // These are as in SendQueue.
  [[nodiscard]] bool Push(uint32_t shard, Contribution contribution);
  [[nodiscard]] bool NoteAnswered(uint32_t shard);
  std::optional<Contribution> Next(uint32_t shard, TimePoint now);
  // Returns what has not been sent to any shard.
  std::deque<Contribution> Close();

  uint32_t owed(uint32_t shard) const { return queues_[shard].owed(); }

 private:
  // Returns the place of the oldest chunk that another shard has not answered, if there is one.
  std::optional<double> OldestBut(uint32_t shard) const;
  // Returns whether the shard's next chunk must wait for those of other shards.
  bool IsAhead(uint32_t shard) const;

  const std::vector<uint32_t> windows_;
  const double lead_;          // of a shard that is not ahead, in chunks of all shards
  std::vector<double> steps_;  // by shard: from one chunk's place to the next one's
  std::vector<SendQueue> queues_;
  std::vector<double> next_places_;  // by shard: the least that its next chunk may have
};

}  // namespace thalweg
