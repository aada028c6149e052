// RoundEngine is the state machine of rounds: it knows which contributions a round holds, when it
// is complete and when it is late. It is pure: time is an argument; there is no I/O, no thread, no
// lock.
//
// A round of a chunk opens with its first contribution and completes with the N-th, in any order of
// arrival. It holds the payloads as received. Nothing is summed before all are there, so there is
// never half a sum (promise 3). The payloads come out in node order, so the sum does not depend on
// timing (promise 2).
#pragma once

#include <bitset>
#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "core/base/clock.h"
#include "core/exchange/rounds.h"

namespace thalweg {

// A RoundEngine is thread-compatible.
class RoundEngine {
 public:
  struct Options {
    uint64_t epoch = 1;
    uint32_t num_nodes = 1;
    uint32_t window_chunks = 1;  // limit of unanswered contributions per node and part
    Duration round_timeout{};
  };

  // A CompleteRound is a round with all its contributions, in node order.
  struct CompleteRound {
    RoundId id;
    WireFormat wire = WireFormat::kFloat32;
    uint64_t elems = 0;
    std::vector<Payload> payloads;
    double loss_scale = kUnknownLossScale;  // what the first node has named
    Duration open{};                        // time since the first contribution
    Duration missing_one{};                 // time since the last but one; unused with one node
  };

  enum class Verdict {
    kHeld,       // waits for other nodes
    kCompleted,  // this was the last contribution
    // this node has already contributed to the open round; the first contribution counts
    kDuplicate,
    kStale,  // the round is already complete
  };

  struct Added {
    Verdict verdict;
    std::optional<CompleteRound> completed;  // set with kCompleted
  };

  struct OpenRound {
    RoundId id;
    TimePoint opened;
    std::vector<uint32_t> missing;  // nodes, ascending
  };

  explicit RoundEngine(const Options& options);

  // Declares that part `part` < kMaxParts of buckets is in use: nodes then have a window for it, as
  // they have for part 0.
  void AllowPart(uint32_t part) { parts_.set(part); }

  // The rounds of a chunk up to `id.round` are complete, somewhere else. Call it before the chunk's
  // first contribution.
  void SetCompleted(const RoundId& id) { chunks_[{id.bucket, id.chunk}].completed = id.round; }

  // Takes a contribution of `node` (< num_nodes), already checked against the bucket's layout.
  // `backlog` results of earlier rounds have not been sent to the node yet: they count as
  // unanswered, so that a node that sends but never reads is bounded too. Returns
  // FailedPrecondition when the contribution belongs to another epoch or to a round that cannot
  // have begun, ResourceExhausted when the node exceeds its window. On error nothing has changed.
  absl::StatusOr<Added> Add(uint32_t node, Contribution contribution, TimePoint now,
                            uint32_t backlog = 0);

  // Returns the rounds that have been open for longer than the timeout.
  std::vector<OpenRound> Expired(TimePoint now) const;
  // Returns the open round that has waited longest for `node`, if any.
  std::optional<OpenRound> OldestWaitingFor(uint32_t node) const;
  // Returns the round that has been open for longest, if any.
  std::optional<OpenRound> Oldest() const;

  // Drops the rounds of earlier layouts of bucket `id.index`; returns how many of them were open.
  size_t DropOlderLayouts(BucketId id);

  size_t open_rounds() const { return open_rounds_; }
  uint64_t held_bytes() const { return held_bytes_; }
  // Returns how many contributions of all nodes can be held here together.
  uint64_t max_held() const {
    return uint64_t{options_.num_nodes} * options_.window_chunks * parts_.count();
  }

 private:
  using ChunkKey = std::pair<BucketId, uint32_t>;
  struct ChunkState {
    uint64_t completed = 0;  // number of the last complete round
    TimePoint opened;        // when round completed + 1 opened; valid when count > 0
    TimePoint latest;        // when its latest contribution came
    uint32_t count = 0;
    std::vector<std::optional<Contribution>> held;  // by node; empty when count is 0
  };

  OpenRound Describe(const ChunkKey& key, const ChunkState& state) const;
  CompleteRound Take(const ChunkKey& key, ChunkState& state, TimePoint now);

  Options options_;
  std::bitset<kMaxParts> parts_{1};
  std::map<ChunkKey, ChunkState> chunks_;
  std::vector<uint32_t> outstanding_;  // contributions held per node
  size_t open_rounds_ = 0;
  uint64_t held_bytes_ = 0;
};

}  // namespace thalweg
