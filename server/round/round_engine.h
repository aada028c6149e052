// The state machine of rounds: which contributions a round holds, when it is complete, when it is
// late. Pure: time is an argument, there is no I/O, no thread, no lock.
//
// A round of a chunk opens with its first contribution and completes with the N-th, whatever the
// order of arrival. It holds the payloads as received; nothing is summed before all are there, so
// there is never half a sum (promise 3), and the payloads come out in node order, so the sum does
// not depend on timing (promise 2).
#pragma once

#include <bitset>
#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "core/base/clock.h"
#include "core/base/exchange.h"

namespace thalweg {

// Thread-compatible.
class RoundEngine {
 public:
  struct Options {
    uint64_t epoch = 1;
    uint32_t num_nodes = 1;
    uint32_t window_chunks = 1;  // most unanswered contributions of one node, by part
    Duration round_timeout{};
  };

  // A round with all its contributions, in node order.
  struct CompleteRound {
    RoundId id;
    WireFormat wire = WireFormat::kFloat32;
    uint64_t elems = 0;
    std::vector<Payload> payloads;
    Duration open{};         // since the first contribution
    Duration missing_one{};  // since the last but one; a node alone is not waited for
  };

  enum class Verdict {
    kHeld,       // waits for other nodes
    kCompleted,  // was the last one
    kDuplicate,  // this node has contributed to the open round already; the first one counts
    kStale,      // of a round that is complete
  };

  struct Added {
    Verdict verdict;
    std::optional<CompleteRound> completed;  // with kCompleted
  };

  struct OpenRound {
    RoundId id;
    TimePoint opened;
    std::vector<uint32_t> missing;  // nodes, ascending
  };

  explicit RoundEngine(const Options& options);

  // Part `part` < kMaxParts of buckets is in use: nodes have a window for it, as for part 0.
  void AllowPart(uint32_t part) { parts_.set(part); }

  // Takes a contribution of `node` (< num_nodes), already checked against the bucket's layout.
  // `backlog` results of earlier rounds have not been sent to it yet: they count as unanswered, so
  // that a node which sends but never reads is bounded too.
  // FailedPrecondition: of another epoch, or of a round that cannot have begun.
  // ResourceExhausted: the node exceeds its window. On error nothing has changed.
  absl::StatusOr<Added> Add(uint32_t node, Contribution contribution, TimePoint now,
                            uint32_t backlog = 0);

  // Rounds that have been open for longer than the timeout.
  std::vector<OpenRound> Expired(TimePoint now) const;
  // The open round that has waited longest for `node`, if any.
  std::optional<OpenRound> OldestWaitingFor(uint32_t node) const;
  // The one that has been open for longest, if any.
  std::optional<OpenRound> Oldest() const;

  // Forgets the rounds of earlier layouts of bucket `id.index`. Returns how many of them were open.
  size_t DropOlderLayouts(BucketId id);

  size_t open_rounds() const { return open_rounds_; }
  uint64_t held_bytes() const { return held_bytes_; }
  // Contributions that all nodes together can have held here.
  uint64_t max_held() const {
    return uint64_t{options_.num_nodes} * options_.window_chunks * parts_.count();
  }

 private:
  using ChunkKey = std::pair<BucketId, uint32_t>;
  struct ChunkState {
    uint64_t completed = 0;  // last complete round
    TimePoint opened;        // of round completed + 1, when count > 0
    TimePoint latest;        // when its latest contribution came
    uint32_t count = 0;
    std::vector<std::optional<Contribution>> held;  // by node; empty when count is 0
  };

  OpenRound Describe(const ChunkKey& key, const ChunkState& state) const;
  CompleteRound Take(const ChunkKey& key, ChunkState& state, TimePoint now);

  Options options_;
  std::bitset<kMaxParts> parts_{1};
  std::map<ChunkKey, ChunkState> chunks_;
  std::vector<uint32_t> outstanding_;  // contributions held, by node
  size_t open_rounds_ = 0;
  uint64_t held_bytes_ = 0;
};

}  // namespace thalweg
