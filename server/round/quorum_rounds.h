// QuorumRounds makes updates of what nodes contribute that train by themselves: of what is there
// when all of them have contributed, or a quorum has and a grace for the others is over.
//
// It is pure: time is an argument; there is no I/O, no thread, no lock. A node waits from its
// contribution to the update that has it. One that comes when the others' update is over is late:
// it knows of older weights, so it gets those of the moment at once, what it gives is kept for the
// next update or dropped, and it does not count towards a quorum.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/clock.h"
#include "core/base/update.h"
#include "core/exchange/rounds.h"
#include "server/round/lone_rounds.h"
#include "server/round/round_engine.h"

namespace thalweg {

// QuorumRounds is thread-compatible.
class QuorumRounds {
 public:
  explicit QuorumRounds(uint32_t num_nodes)
      : num_nodes_(num_nodes), held_(num_nodes), ending_(num_nodes) {}

  // A Giver is the node whose contribution it is.
  struct Giver {
    uint32_t node = 0;
    uint32_t workers = 1;
    uint64_t window = 1;  // so many of its contributions may wait
  };
  // Takes a contribution, whose payload has been checked against its bucket's layout, with the
  // bucket's rule and the settings that the contribution names. The result is as that of
  // RoundEngine::Add. Errors as LoneRounds::Add, and on these, too, nothing has changed:
  //   ResourceExhausted: the node exceeds its window;
  //   Aborted: fewer nodes than a quorum are left.
  absl::StatusOr<RoundEngine::Added> Add(const Giver& giver, Contribution contribution,
                                         std::shared_ptr<const UpdateRule> rule,
                                         const UpdateStep& settings, TimePoint now);

  // Returns the updates whose grace is over, or for which nobody is missing any more.
  std::vector<CompleteRound> Ripe(TimePoint now);
  // All go on without the node, which has left or is lost. What it has contributed counts.
  // Impossible are the updates for which fewer nodes than a quorum are left.
  RoundEngine::Removed Remove(uint32_t node, TimePoint now);
  // Returns the updates for which a node has waited longer than `timeout`.
  std::vector<RoundEngine::OpenRound> Expired(TimePoint now, Duration timeout) const;

  // Returns the update for which a node has waited longest, if any waits.
  std::optional<RoundEngine::OpenRound> Oldest() const;
  // Returns how many bytes the payloads of what waits, or is kept, have.
  uint64_t held_bytes() const { return held_bytes_; }

  // Forgets the rounds of earlier layouts of bucket `id.index`.
  void DropOlderLayouts(BucketId id);

  // How much later than a quorum a node may usually come for the others to wait for it, as a part
  // of the time from one update to the next, and for how many times as long they wait.
  static constexpr int kGracePart = 8;
  static constexpr int kGraceFactor = 2;

 private:
  // A Share is one node's contribution, as a round of its own.
  struct Share {
    CompleteRound round;
    TimePoint came;
    bool is_empty = false;  // gives nothing
    uint64_t bytes() const { return round.payloads.front().SizeBytes(); }
  };
  // A Seat is what a chunk knows of a node.
  struct Seat {
    uint64_t version = 0;              // that it got last
    std::optional<Duration> lateness;  // how much later than a quorum it usually comes
  };
  struct Chunk {
    std::shared_ptr<const UpdateRule> rule;
    uint64_t version = 0;                 // updates so far
    std::map<uint32_t, Seat> seats;       // by node, as are the next three
    std::multimap<uint32_t, Share> kept;  // late ones, whose nodes have been answered
    std::map<uint32_t, Share> waiting;
    std::map<uint32_t, Share> ending;  // that wait for all
    std::optional<TimePoint> quorum;   // since when it is there
    TimePoint last_quorum;             // of the update before
    std::optional<TimePoint> updated;
    Duration interval{};  // between the last two updates
  };
  using Key = std::pair<BucketId, uint32_t>;  // and the number of the chunk

  bool IsHere(uint32_t node) const { return !gone_.contains(node); }
  // Return for whom what waits in the chunk waits, and for whom what ends there.
  std::vector<uint32_t> Missing(const Chunk& chunk) const;
  std::vector<uint32_t> NotEnding(const Chunk& chunk) const;
  size_t NumHere() const { return num_nodes_ - gone_.size(); }
  absl::Status CheckAdd(const Giver& giver, const RoundId& id, const UpdateRule& rule,
                        bool waits_for_all) const;
  // Learns how late the node is.
  void Measure(const Chunk& chunk, Seat& seat, TimePoint now);
  Duration Grace(const Chunk& chunk, const std::vector<uint32_t>& missing) const;
  // Returns the chunk's update if it is complete.
  std::optional<CompleteRound> Close(const Key& key, Chunk& chunk, TimePoint now);
  // Makes an update of these shares and of those that are kept, for the nodes of the former.
  CompleteRound Take(const Key& key, Chunk& chunk, std::map<uint32_t, Share> shares, TimePoint now);
  RoundEngine::OpenRound Describe(const Key& key, const Chunk& chunk) const;

  uint32_t num_nodes_;
  LoneRounds lone_;
  std::map<Key, Chunk> chunks_;
  std::set<uint32_t> gone_;
  // A quorum has not waited for these, and nothing has come of them since: nobody else does.
  std::set<uint32_t> behind_;
  std::vector<uint64_t> held_;  // by node: its contributions that wait, and of these
  // those that wait for all. While there are any, no chunk waits for the node: what it has for
  // others may not come before its window lets it.
  std::vector<uint64_t> ending_;
  uint64_t held_bytes_ = 0;
};

}  // namespace thalweg
