// JobRounds is what a job sums on a shard: the layouts of its buckets, the rounds that are open,
// and what is kept of chunks from one round to the next. A contribution goes to the rounds that its
// bucket's rule asks for: all nodes' (RoundEngine), one node's (LoneRounds), or a quorum's.
//
// It is pure: time is an argument; there is no I/O, no thread, no lock.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/exchange/join.h"
#include "core/exchange/rounds.h"
#include "server/plan/flow_plan.h"
#include "server/round/chunk_states.h"
#include "server/round/completed.h"
#include "server/round/layout_registry.h"
#include "server/round/lone_rounds.h"
#include "server/round/membership.h"
#include "server/round/quorum_rounds.h"
#include "server/round/resumption.h"
#include "server/round/round_engine.h"
#include "server/round/step_settings.h"

namespace thalweg {

// JobRounds is thread-compatible. When a call that changes it fails, the job must fail.
class JobRounds {
 public:
  // Both must outlive it. `keeps_snapshots`: the shard does, of weights.
  JobRounds(const JoinRequest& first, const Members& members, bool keeps_snapshots);

  // Adds the last completed rounds of a node that resumes the job; see Resumption.
  absl::Status AddCompleted(uint32_t node, const std::vector<BucketRounds>& completed) {
    return resumption_.Add(node, completed);
  }
  // All nodes have joined. Returns how many chunks go on where the nodes say they were. DataLoss:
  // the shard has lost weights.
  absl::StatusOr<size_t> Begin(const FlowPlan& flow);
  // Nothing will come any more: lets go of everything.
  void Release();

  // These are of a node that takes part; see Job. Errors name it.
  absl::Status Register(uint32_t node, const BucketAnnouncement& bucket);
  absl::Status SetGroup(const Group& group) { return engine_.SetGroup(group); }
  absl::Status SetSettings(uint32_t node, uint64_t number, const UpdateStep& step);

  // These pass on results that some nodes lack; see Resumption. Supply checks the result, too,
  // whose payload may have so many bytes.
  std::vector<BucketRounds> WantedFrom(uint32_t node) const { return resumption_.WantedFrom(node); }
  absl::StatusOr<std::vector<uint32_t>> Supply(uint32_t node, const RoundResult& result,
                                               uint64_t most_bytes);

  // A Counted says how a contribution counts in statistics.
  struct Counted {
    LayoutRegistry::Weight weight;
    uint64_t bytes = 0;  // of its payload
    RoundEngine::Verdict verdict = RoundEngine::Verdict::kHeld;
    std::optional<Lateness> late;  // where a quorum would do
  };
  // A Held is what follows from a contribution.
  struct Held {
    std::optional<Counted> counted;     // unset if it repeats one that a restarted shard had summed
    std::optional<RoundResult> missed;  // the result that the node lacks then, if it is there
    std::optional<Completed> completed;  // the round, if this was what it waited for
    std::optional<Asked> asked;          // what the node is to get before that
  };
  // Takes a contribution; for `backlog` see RoundEngine::Add.
  absl::StatusOr<Held> Hold(uint32_t node, Contribution contribution, TimePoint now,
                            uint32_t backlog);

  // Says whether the job can go on without the node; the first goes on, and the second where it has
  // left. Aborted: a round waits for it. All return the rounds that are complete without it, and
  // the last one those whose grace is over.
  absl::Status CheckMayLose(uint32_t node) const { return resumption_.CheckMayLose(node); }
  absl::StatusOr<std::vector<Completed>> Lose(uint32_t node, const absl::Status& why,
                                              TimePoint now);
  absl::StatusOr<std::vector<Completed>> Leave(uint32_t node, TimePoint now);
  absl::StatusOr<std::vector<Completed>> TakeRipe(TimePoint now);
  // Returns the rounds that have been open for longer than their timeouts, and the one that has
  // been open longest.
  std::vector<RoundEngine::OpenRound> Expired(TimePoint now) const;
  std::optional<RoundEngine::OpenRound> Oldest() const;

  // Returns the state of a chunk of a registered bucket, making it at first use.
  std::shared_ptr<ChunkState> StateOf(BucketId bucket, uint32_t chunk, uint64_t elems);
  void DropStates() { states_ = ChunkStates(); }
  const ChunkStates& states() const { return states_; }
  const LayoutRegistry& layouts() const { return layouts_; }
  // Returns that the shard was restarted and has forgotten the job's weights, and what helps.
  absl::Status LostWeights() const;

  uint64_t epoch() const { return engine_.epoch(); }  // that contributions must have
  uint64_t window_of(uint32_t node) const { return engine_.window_of(node); }
  size_t open_rounds() const { return engine_.open_rounds(); }
  uint64_t held_bytes() const { return engine_.held_bytes() + quorum_.held_bytes(); }
  uint64_t max_held_bytes() const { return engine_.max_held() * flow_.chunk_bytes; }
  // Return what states will take, and the resumption with results of so many bytes.
  uint64_t state_bytes() const;
  uint64_t resumption_bytes(uint64_t of_result) const {
    return resumption_.bytes() + resumption_.num_missing() * of_result;
  }
  size_t num_missing() const { return resumption_.num_missing(); }  // results that nodes lack

 private:
  using Rule = std::shared_ptr<const UpdateRule>;

  // Checks a contribution to a one-shot round, which has no layout, by itself.
  absl::Status CheckOneShot(uint32_t node, const Contribution& contribution) const;
  // Holds a contribution of a node that has rounds of its own; the second with a quorum.
  absl::StatusOr<RoundEngine::Added> AddApart(uint32_t node, Contribution contribution,
                                              const Rule& rule, TimePoint now);
  absl::StatusOr<RoundEngine::Added> AddToQuorum(uint32_t node, Contribution contribution,
                                                 const Rule& rule, TimePoint now);
  // Says what the node waits for after its contribution: weights of version `least`, or later ones.
  absl::StatusOr<Asked> AskFor(uint32_t node, const RoundResult& contributed, uint64_t least,
                               Rule rule, double raw_bytes) const;
  // Finds what is done with a round that the contribution of `node` has completed, or its loss.
  absl::StatusOr<Completed> Complete(CompleteRound round, double raw_bytes, uint32_t node,
                                     TimePoint now);
  absl::Status CompleteAll(RoundEngine::Removed removed, uint32_t node, const absl::Status& why,
                           TimePoint now, std::vector<Completed>* completed);
  absl::StatusOr<std::shared_ptr<const UpdateStep>> SettingsOf(const RoundId& id,
                                                               uint64_t number) const;
  absl::Status NoWeights(const RoundId& id) const;
  RoundEngine MakeEngine(std::vector<uint32_t> workers) const;

  const JoinRequest& spec_;
  const Members& members_;
  const bool keeps_snapshots_;
  FlowPlan flow_;  // empty until Begin
  LayoutRegistry layouts_;
  Resumption resumption_;
  RoundEngine engine_;
  LoneRounds lone_;
  QuorumRounds quorum_;
  ChunkStates states_;
  StepSettings settings_;
};

}  // namespace thalweg
