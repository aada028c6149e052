// SendLane holds the chunks of one part number of a group's buckets that wait to go to the shards.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "core/base/clock.h"
#include "core/exchange/rounds.h"
#include "server/base/metrics.h"

namespace thalweg {

// Thread-compatible. Chunks for one shard leave in the order in which they came. Every shard has a
// queue and a window of its own, so that one that owes a window of results holds up no other; what
// comes meanwhile waits, in the memory that it has been encoded in. The network divides a node's
// link by connections, not by what each of them has to carry, so the shard with the largest share
// would be done last, alone. Therefore a shard that is ahead gets one chunk at a time, until the
// others have caught up. A chunk's place tells that: in a shard's queue, the places of chunks that
// follow each other differ by all shares over that shard's, so queues that keep the same pace do
// their shares, whatever the order in which chunks came (an allreduce's come for all shards in
// turn, a reduce_scatter's for one shard after the other). A shard is ahead if its next chunk's
// place is larger than that of the oldest chunk that another one has not answered, by more than
// half of what all windows hold, or by more than all of it where windows are alike. There is always
// a chunk on its way to every shard for which one waits, so nodes whose chunks come in different
// orders at different shards do not wait for each other.
class SendLane {
 public:
  // All are by shard. Shares are above 0; windows are whole numbers, so that they are only roughly
  // in proportion to them. `wait_seconds` count how long chunks have waited for a place in a
  // window; they must outlive the lane.
  SendLane(const std::vector<uint32_t>& windows, const std::vector<double>& shares,
           std::span<Counter* const> wait_seconds);

  // Adds a chunk. Returns whether the caller must send: it calls Next, and passes on what that
  // returns, until that returns nothing. Otherwise another caller is about to call Next.
  [[nodiscard]] bool Push(uint32_t shard, Contribution contribution);
  // The shard has answered one chunk. The result is that of Push.
  [[nodiscard]] bool NoteAnswered(uint32_t shard);
  // Returns the next chunk to send, if the shard may have one.
  std::optional<Contribution> Next(uint32_t shard, TimePoint now);
  // Returns what has not been sent to any shard and never will be; the caller releases it without
  // locks.
  std::deque<Contribution> Close();

  // Returns how many chunks have been sent to the shard and are not answered.
  uint32_t owed(uint32_t shard) const { return queues_[shard].owed(); }

 private:
  struct Queue {
    uint32_t window;
    double step;  // from one chunk's place to the next one's
    Counter* wait_seconds;
    std::deque<Contribution> waiting = {};
    std::deque<double> places = {};            // of the chunks owed, then of those that wait
    double next_place = 0;                     // the least that the next chunk may have
    bool is_sending = false;                   // some caller has been told to send
    std::optional<TimePoint> full_since = {};  // set while chunks wait for a place

    uint32_t owed() const { return static_cast<uint32_t>(places.size() - waiting.size()); }
    bool BeginSending() { return !std::exchange(is_sending, true); }
  };

  // Returns the place of the oldest chunk that another shard has not answered, if there is one.
  std::optional<double> OldestBut(uint32_t shard) const;
  // Returns whether the shard's next chunk must wait for those of other shards.
  bool IsAhead(uint32_t shard) const;

  const double lead_;          // of a shard that is not ahead, in chunks of all shards
  std::vector<Queue> queues_;  // by shard
};

}  // namespace thalweg
