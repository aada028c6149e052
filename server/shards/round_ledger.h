// RoundLedger remembers what a shard needs to know of one node when it has been restarted: the
// groups, the buckets, the contributions that have no result, and the last result of every chunk.
// It knows of one-shot rounds only which are open: no shard can take them up again.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "core/exchange/rounds.h"

namespace thalweg {

// Thread-compatible. It refers to payloads and copies none. A contribution's memory is in use until
// its result comes anyway; that of the results is one gradient as it crosses the network.
class RoundLedger {
 public:
  void NoteBucket(const BucketAnnouncement& bucket);
  void NoteGroup(const Group& group) { groups_.push_back(group); }
  void NoteContribution(const Contribution& contribution);
  // Takes the last result of a chunk, which was known before the ledger began.
  void NoteLast(const RoundResult& result);
  // What a result replaces, for the caller to destroy without locks.
  struct Replaced {
    std::optional<Contribution> contribution;
    std::vector<RoundResult> results;
  };
  // Returns false when no contribution waits for the result, which then is not remembered.
  bool NoteResult(const RoundResult& result, Replaced* replaced);

  const std::vector<Group>& groups() const { return groups_; }
  size_t num_open_one_shots() const { return one_shots_.size(); }
  // Says whether letters have passed, in any direction. Nobody answers them, so that nobody knows
  // which a shard has lost.
  bool has_letters() const { return has_letters_; }
  // All of these are in ascending order of buckets and chunks.
  std::vector<BucketAnnouncement> Buckets() const;
  std::vector<Contribution> Unanswered() const;
  // The rounds of the last results, as JoinRequest::resume wants them.
  std::vector<BucketRounds> Completed() const;
  // Returns the results of these rounds, or InvalidArgument when one is not the chunk's last.
  absl::StatusOr<std::vector<RoundResult>> Results(const std::vector<BucketRounds>& rounds) const;

  // Returns how many bytes the payloads of the results have.
  uint64_t result_bytes() const { return result_bytes_; }

 private:
  struct Chunk {
    std::optional<Contribution> unanswered;
    std::optional<RoundResult> last;
  };

  // Moves the results of earlier layouts to `replaced`.
  void DropOlderLayouts(BucketId bucket, Replaced* replaced);

  std::vector<Group> groups_;
  std::set<RoundId> one_shots_;                                          // without a result
  std::map<std::pair<uint32_t, uint32_t>, BucketAnnouncement> buckets_;  // by index and part
  std::map<std::pair<BucketId, uint32_t>, Chunk> chunks_;                // by bucket and chunk
  uint64_t result_bytes_ = 0;
  bool has_letters_ = false;
};

}  // namespace thalweg
