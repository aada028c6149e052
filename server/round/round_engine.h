// RoundEngine is the state machine of rounds: it knows which contributions a round holds, when it
// is complete and when it is late. It is pure: time is an argument; there is no I/O, no thread, no
// lock.
//
// A round of a group opens with the first contribution, which says what it does and when it is
// late, and completes with the last node's, in any order of arrival. It holds the payloads as
// received. Nothing is summed before all are there, so there is never half a sum (promise 3 of
// docs/architecture.md), and in node order, so that the sum does not depend on timing (promise 2).
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "core/base/clock.h"
#include "core/exchange/rounds.h"
#include "server/round/chunk_set.h"
#include "server/round/complete_round.h"
#include "server/round/held_round.h"
#include "server/round/round_group.h"

namespace thalweg {

// A RoundEngine is thread-compatible.
class RoundEngine {
 public:
  struct Options {
    uint64_t epoch = 1;
    uint32_t num_nodes = 1;
    uint32_t window_chunks = 1;  // of group 0: unanswered contributions per node and part
    Duration round_timeout{};
    std::vector<uint32_t> workers = {};  // by node; empty: one each
  };

  enum class Verdict {
    kHeld,       // waits for other nodes
    kCompleted,  // this was the last contribution
    kDuplicate,  // of this node's to the open round, which counts
    kStale,      // the round is already complete
  };

  struct Added {
    Verdict verdict;
    std::optional<CompleteRound> completed;  // set with kCompleted
    Lateness late = {};                      // with a quorum
  };

  struct OpenRound {
    RoundId id;
    TimePoint opened;
    std::vector<uint32_t> missing;  // nodes, ascending
    Duration timeout{};
  };

  static constexpr size_t kMaxGroups = 1024;
  // How many one-shot rounds may be complete that some node has not settled.
  static constexpr size_t kMaxUnsettled = 1 << 18;

  explicit RoundEngine(const Options& options);

  // Declares a group other than 0. Each of its nodes gets a window of its own, so that groups never
  // wait for each other. Doing it again changes nothing. InvalidArgument: as CheckGroup says, or
  // the group is known otherwise. ResourceExhausted: there are kMaxGroups.
  absl::Status SetGroup(const Group& group);

  // Gives nodes in group 0 a window for part `part` < kMaxParts of buckets, as for part 0.
  void AllowPart(uint32_t part);

  // The chunk's rounds up to `id.round` are complete elsewhere. Call it before it has any other.
  void SetCompleted(const RoundId& id) { completed_[{id.bucket, id.chunk}] = id.round; }

  // Takes a contribution of `node` (< num_nodes), whose payload has been checked against what its
  // bucket's layout, or the job, allows. `backlog` results of earlier rounds have not been sent to
  // the node yet: they count as unanswered, so that a node that sends but never reads is bounded
  // too. On error nothing has changed:
  //   FailedPrecondition: it is of another epoch, or its round cannot begin or needs a lost node;
  //   InvalidArgument: the node is not in the group, there is no such collective, nothing is wanted
  //     from the node and it gives something, or it differs from the round's first contribution in
  //     group, collective, format or elements (both nodes are named);
  //   ResourceExhausted: the node exceeds its window, or kMaxUnsettled is reached.
  // With `ahead`, a node may contribute to a chunk's rounds up to so many after the one that waits
  // for others, one after the other; windows do not count these.
  absl::StatusOr<Added> Add(uint32_t node, Contribution contribution, TimePoint now,
                            uint32_t backlog = 0, uint32_t ahead = 0);

  struct Removed {
    std::vector<CompleteRound> completed;
    std::vector<OpenRound> impossible;  // only the lost node has what these pass on
  };
  // All groups go on without the lost node. Open rounds that lack only lost nodes complete with
  // what they hold; those that cannot are dropped. What a lost node has contributed counts.
  Removed Remove(uint32_t node, TimePoint now);

  // Returns the rounds that have been open for longer than their timeouts.
  std::vector<OpenRound> Expired(TimePoint now) const;
  // Return the round that has been open longest, for `node` or for any, if there is one.
  std::optional<OpenRound> OldestWaitingFor(uint32_t node) const;
  std::optional<OpenRound> Oldest() const;

  // Drops the rounds of earlier layouts of bucket `id.index`; returns how many of them were open.
  size_t DropOlderLayouts(BucketId id);
  uint64_t epoch() const { return options_.epoch; }
  size_t open_rounds() const { return open_.size(); }
  // Returns how many runs of chunks of one-shot rounds are remembered to recognise repeats.
  size_t unsettled_runs() const { return finished_runs_; }
  uint64_t held_bytes() const { return held_bytes_; }
  // Return how many contributions windows let all nodes have here, and one.
  uint64_t max_held() const;
  uint64_t window_of(uint32_t node) const { return windows_[node]; }

 private:
  struct Seat {
    RoundGroup& group;
    size_t index;
  };
  using Open = std::map<RoundId, HeldRound>;

  void Insert(const Group& group);
  absl::StatusOr<Seat> FindSeat(uint32_t node, const Contribution& contribution);
  // These say whether a contribution is to be held, is known already, or why it is refused: the
  // second by its number alone, the third if it opens a round.
  absl::StatusOr<Verdict> Judge(uint32_t node, const Seat& seat, const Contribution& contribution,
                                uint32_t backlog, uint32_t ahead) const;
  absl::StatusOr<Verdict> JudgeNumber(uint32_t node, const Seat& seat, const Contribution& c,
                                      uint32_t ahead) const;
  absl::Status CheckOpening(const RoundGroup& group, const Contribution& contribution) const;
  absl::Status CheckWindow(uint32_t node, const Seat& seat, uint32_t backlog) const;
  CompleteRound Take(Open::iterator open, TimePoint now);
  Open::iterator Drop(Open::iterator open);  // returns the next one
  void Release(const HeldRound& round);      // no longer counts what it holds
  // Forgets the one-shot rounds that all nodes of the group have settled.
  void ForgetSettled(const RoundGroup& group);
  bool HasFinished(uint32_t group, uint64_t sequence, uint32_t chunk) const;
  OpenRound Describe(const Open::value_type& open) const;

  Options options_;
  std::map<uint32_t, RoundGroup> groups_;
  std::map<std::pair<BucketId, uint32_t>, uint64_t> completed_;  // by chunk: its last round
  Open open_;
  std::map<std::pair<uint32_t, uint64_t>, ChunkSet> finished_;  // by group and sequence number
  size_t finished_runs_ = 0;                                    // of all of these
  std::vector<uint32_t> outstanding_;  // contributions held per node, in all groups
  std::vector<uint64_t> windows_;      // per node, of all its groups together
  uint64_t held_bytes_ = 0;
};

}  // namespace thalweg
