// Members knows who takes part in a job: which nodes have a seat, who has joined, left or been
// lost, how long each has been silent, and the epoch. It is pure: time is an argument; there is no
// I/O, no thread, no lock. Each of its decisions says why, in a sentence for people.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "core/base/clock.h"
#include "core/exchange/collective.h"
#include "core/exchange/join.h"
#include "core/exchange/member.h"

namespace thalweg {

// A job has one seat for each of its nodes, and begins when all have joined. Its active nodes are
// those that its rounds need: all at first. One that leaves is still needed; one that is lost is
// not. The epoch is 1 at first and rises by one whenever the active set changes after the job has
// begun. Members is thread-compatible; nodes are numbered below num_nodes.
class Members {
 public:
  enum class State : uint8_t {
    kAwaited,  // has not joined
    kPresent,
    kLeft,
    kLost,
  };

  // The name and what follows it are set when the node joins.
  struct Node {
    State state = State::kAwaited;
    std::string name;  // "node 1 (host)"
    std::string host;
    uint32_t workers = 0;
    TimePoint last_heard;
    Duration lease{};
    std::string lost_because;  // set with kLost
  };

  // A Finding is a node about which something is decided, and why.
  struct Finding {
    uint32_t node = 0;
    absl::Status why;
  };

  // A Change is what follows from a change of the active set.
  struct Change {
    uint64_t epoch = 0;
    std::vector<uint32_t> active;  // ascending
    std::string why;
  };

  // The job is the one that `first` describes; nobody has joined.
  explicit Members(const JoinRequest& first);

  // These say whether a node may join. AlreadyExists: another one has the seat. InvalidArgument: it
  // is the last one, and the workers of all nodes do not add up to the world size.
  absl::Status CheckSeat(const JoinRequest& request) const;
  absl::Status CheckWorkers(const JoinRequest& request) const;
  // Gives the node its seat, once both allow it.
  void Join(const JoinRequest& request, TimePoint now);
  // The job begins: call once, when all have joined. The leases begin, too: until now the nodes
  // waited for each other and could send nothing.
  void Begin(TimePoint now);

  // The node has sent something. Errors as CheckActive.
  absl::Status Hear(uint32_t node, TimePoint now);
  // Returns whether the job has begun, and a present node has been heard of since, or could not
  // yet: the first heartbeats are due.
  bool IsInUse(TimePoint now) const;
  // Ends the node's membership; returns false when it is not present.
  bool Leave(uint32_t node);
  // Returns whether the job can go on without the node: its Losses say so, and it has begun.
  bool CanLose(uint32_t node) const;
  // The job goes on without the node, because of `why`, a sentence. Call it once per node, and only
  // after Begin.
  Change SetLost(uint32_t node, const std::string& why);

  // Returns OK when the node may take part. FailedPrecondition: not all have joined, or it has been
  // lost. NotFound: it has left.
  absl::Status CheckActive(uint32_t node) const;
  // Returns InvalidArgument when the group has a node with more workers than the node has.
  absl::Status CheckGroup(const Group& group) const;
  // Returns OK unless an active node has left: Aborted names the first, and no round can complete.
  absl::Status CheckNoneLeft() const;
  // Returns why the job fails when `node` leaves for `reason`, which is an error: a node that knows
  // why the job has failed names the culprit; otherwise the node itself is it.
  absl::Status Blame(uint32_t node, const absl::Status& reason) const;
  // Returns the present nodes whose lease is over. (Unavailable) Before `awake_since` this process
  // did not run, so that it could hear nobody.
  std::vector<Finding> Silent(TimePoint now, TimePoint awake_since = TimePoint::min()) const;
  std::vector<LostNode> Lost() const;

  bool IsComplete() const { return joined_ == nodes_.size(); }  // all have joined
  bool IsEmpty() const { return present_ == 0; }
  uint64_t epoch() const { return epoch_; }
  const std::vector<Node>& all() const { return nodes_; }  // by node
  std::vector<uint32_t> Workers() const;                   // by node

  // For messages: "node 1 (host)", "node 0 (host), node 1 (host)", and "nodes 1, 2 of 4", which are
  // those that have not joined.
  const std::string& Name(uint32_t node) const { return nodes_[node].name; }
  std::string Names(const std::vector<uint32_t>& nodes) const;
  std::string Missing() const;

 private:
  const std::string job_;
  const uint32_t world_size_;
  const uint32_t min_nodes_;
  const Duration heartbeat_interval_;
  std::vector<Node> nodes_;
  uint32_t joined_ = 0;  // nodes that have ever joined
  uint32_t present_ = 0;
  TimePoint begun_;
  uint64_t epoch_ = 1;
};

}  // namespace thalweg
