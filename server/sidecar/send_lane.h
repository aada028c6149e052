// SendLane holds the chunks of one part number of a group's buckets that wait to go to the shards.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <vector>

#include "core/base/clock.h"
#include "core/base/metrics.h"
#include "core/exchange/rounds.h"
#include "server/sidecar/send_queue.h"

namespace thalweg {

// Thread-compatible. Every shard has a queue and a window of its own, so that one that owes a
// window of results holds up no other. The network divides a node's link by connections, not by
// what each of them has to carry, so the shard with the largest share would be done last, alone.
// Therefore a shard that is ahead gets one chunk at a time, until the others have caught up: its
// next chunk came later than the oldest one that another shard has not answered, by more than half
// of what all windows hold, or by more than all of it where windows are alike. There is always a
// chunk on its way to every shard for which one waits, so nodes whose chunks come in different
// orders at different shards do not wait for each other.
class SendLane {
 public:
  // Windows and `wait_seconds` (SendQueue) are by shard.
  SendLane(std::vector<uint32_t> windows, std::span<Counter* const> wait_seconds);

  // These are as in SendQueue.
  [[nodiscard]] bool Push(uint32_t shard, Contribution contribution);
  [[nodiscard]] bool NoteAnswered(uint32_t shard);
  std::optional<Contribution> Next(uint32_t shard, TimePoint now);
  // Returns what has not been sent to any shard.
  std::deque<Contribution> Close();

  uint32_t owed(uint32_t shard) const { return queues_[shard].owed(); }

 private:
  // Returns whether the shard's next chunk must wait for those of other shards.
  bool IsAhead(uint32_t shard) const;

  const std::vector<uint32_t> windows_;
  const uint64_t lead_;  // of a shard that is not ahead, in chunks of all shards
  std::vector<SendQueue> queues_;
  uint64_t pushed_ = 0;  // chunks, of all shards
};

}  // namespace thalweg
