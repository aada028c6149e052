// CollectiveRunner takes the collectives of a job's groups on one node from their workers to their
// results.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "core/base/clock.h"
#include "core/base/mutex.h"
#include "core/base/thread.h"
#include "core/exchange/rounds.h"
#include "core/ipc/message.h"
#include "server/base/metrics.h"
#include "server/shards/placement.h"
#include "server/shards/shard_group.h"
#include "server/sidecar/collective/arenas.h"
#include "server/sidecar/collective/collective_listener.h"
#include "server/sidecar/collective/collective_plan.h"
#include "server/sidecar/collective/flight_record.h"
#include "server/sidecar/collective/node_collective.h"
#include "server/sidecar/job/job_outcome.h"
#include "server/sidecar/job/progress.h"

namespace thalweg {

// A group's collectives run in the order of their sequence, those of several groups in the order in
// which their workers have come. Small ones run on the thread that brings the last worker; the
// others, and the declaration of groups, on a thread of the runner's, which starts with the first
// group. Thread-safe.
class CollectiveRunner {
 public:
  // The parts of the job that it uses; all must outlive it.
  struct Context {
    const JobOutcome& outcome;
    Progress& progress;
    ShardGroup& shards;
    Arenas& arenas;
    const JobTrace& trace;
    Counter& completed;
  };
  struct Terms {
    uint32_t node = 0;
    Duration patience{};          // for a declaration at the shards
    std::vector<uint32_t> hosts;  // by shard: the node that hosts it, or kNoHost; may be empty
  };

  CollectiveRunner(Terms terms, const Context& context, CollectiveListener& listener);
  ~CollectiveRunner() { Stop(); }

  // InvalidArgument: the worker contradicts the group's others, or itself.
  absl::Status MakeGroup(uint32_t local_rank, const ipc::MakeGroup& message);
  absl::Status Collect(uint32_t local_rank, ipc::Collect message);
  absl::Status Take(uint32_t local_rank, const ipc::Taken& message);
  // A worker has left; returns Aborted when a collective waits for it, as Collect does for one that
  // is begun afterwards.
  absl::Status OnWorkerLeft(uint32_t local_rank, const std::string& name);

  // Requires IsOneShot(received.id).
  void OnResult(uint32_t shard, const RoundResult& received);

  // Returns DeadlineExceeded, naming group, collective and who is missing, when workers have not
  // come, or shards have not answered, in time, since `awake_since` at most.
  absl::Status CheckLate(TimePoint now, TimePoint awake_since) const;
  // Names what is not done: of each group the first collective.
  std::vector<std::string> UnderWay() const;
  // The job has failed: returns what has become of the latest collectives, a line for each, and
  // traces those that are open.
  std::vector<std::string> LatestFlights(TimePoint now) const;
  // Returns what has become of the latest ones.
  std::vector<FlightReport> Flights(TimePoint now) const {
    MutexLock lock(mutex_);
    return record_.Report(now);
  }
  // Says whether any worker waits for a collective.
  bool IsBusy() const;
  void Wake();
  // Ends the thread; the job must not go on.
  void Stop();

 private:
  struct GroupState {
    std::string name;
    std::shared_ptr<const GroupPlaces> places;
    std::map<uint32_t, uint32_t> ranks;  // in the group, by local rank
    std::map<uint32_t, uint64_t> last;   // sequence that a worker has begun, by local rank
    bool is_declared = false;            // at the shards
    uint64_t started = 0;                // sequence of the last collective that has run
    uint64_t settled = 0;                // all up to this one have their results
    std::set<uint64_t> done;             // beyond `settled`
    std::map<uint64_t, std::shared_ptr<NodeCollective>> collectives;  // by sequence
    std::map<std::optional<uint32_t>, Placement> placements;  // by the node that is left out
  };

  GroupState* FindLocked(uint32_t group) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns null if there is none.
  std::shared_ptr<NodeCollective> FindLocked(uint32_t group, uint64_t sequence)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::shared_ptr<NodeCollective> MakeLocked(GroupState& group, uint32_t rank,
                                             const ipc::Collect& message)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns the next collective that can run.
  std::shared_ptr<NodeCollective> NextLocked(bool small_only) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckComingLocked(const GroupState& group, const NodeCollective& collective) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Queue(GroupState& group) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Runs what can run, unless another thread does.
  void Drain(bool small_only);
  void RunLoop();
  absl::Status Declare(uint32_t group);
  absl::Status Start(const std::shared_ptr<NodeCollective>& collective);
  std::vector<uint32_t> ShardsOf(GroupState& group, const Route& route, const ChunkPlan& cut,
                                 uint64_t sequence) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // A chunk is done; tells workers of parts of the result, or of the whole.
  void FinishChunk(const std::shared_ptr<NodeCollective>& collective);
  void Complete(const std::shared_ptr<NodeCollective>& collective);
  // Returns ranks in the group by local rank.
  std::map<uint32_t, uint32_t> RanksOf(uint32_t group) const;

  const Terms terms_;
  const Context context_;
  CollectiveListener& listener_;

  mutable Mutex mutex_;
  CondVar changed_;
  std::map<uint32_t, GroupState> groups_ ABSL_GUARDED_BY(mutex_);
  std::deque<uint32_t> undeclared_ ABSL_GUARDED_BY(mutex_);  // groups whose workers have all come
  std::deque<std::shared_ptr<NodeCollective>> ready_ ABSL_GUARDED_BY(mutex_);
  bool is_running_ ABSL_GUARDED_BY(mutex_) = false;  // a thread has a collective or declaration
  std::map<uint32_t, std::string> left_ ABSL_GUARDED_BY(mutex_);  // names, by local rank
  FlightRecord record_ ABSL_GUARDED_BY(mutex_){context_.trace};
  bool has_thread_ ABSL_GUARDED_BY(mutex_) = false;
  Thread thread_;
};

}  // namespace thalweg
