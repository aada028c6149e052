#include "server/round/membership.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/exchange/of_job.h"

namespace thalweg {

Members::Members(const JoinRequest& first)
    : job_(first.job),
      world_size_(first.world_size),
      min_nodes_(first.losses.min_nodes),
      heartbeat_interval_(HeartbeatInterval(first.num_shards)),
      nodes_(first.num_nodes) {}

absl::Status Members::CheckSeat(const JoinRequest& request) const {
  const Node& member = nodes_[request.node];
  if (member.state == State::kAwaited) return absl::OkStatus();
  return absl::AlreadyExistsError(absl::StrCat("job '", job_, "' has a node ", request.node,
                                               " already: ", member.name, "; the newcomer is ",
                                               request.node_name));
}

absl::Status Members::CheckWorkers(const JoinRequest& request) const {
  if (joined_ + 1 < nodes_.size()) return absl::OkStatus();
  const uint32_t workers =
      std::accumulate(nodes_.begin(), nodes_.end(), request.workers,
                      [](uint32_t sum, const Node& m) { return sum + m.workers; });
  if (workers == world_size_) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "its nodes have ", workers, " workers together, but the world size is ", world_size_));
}

void Members::Join(const JoinRequest& request, TimePoint now) {
  Node& member = nodes_[request.node];
  member.state = State::kPresent;
  member.name = absl::StrCat("node ", request.node, " (", request.node_name, ")");
  member.host = request.node_name;
  member.workers = request.workers;
  member.last_heard = now;
  member.lease = request.losses.min_nodes == 0
                     ? LeaseFor(request.grace, request.num_shards)
                     : request.losses.grace + HeartbeatInterval(request.num_shards);
  ++joined_;
  ++present_;
}

void Members::Begin(TimePoint now) {
  begun_ = now;
  for (Node& member : nodes_) member.last_heard = now;
}

bool Members::IsInUse(TimePoint now) const {
  if (!IsComplete()) return false;
  const bool may_speak_yet = now - begun_ <= 2 * heartbeat_interval_;
  return std::any_of(nodes_.begin(), nodes_.end(), [&](const Node& node) {
    return node.state == State::kPresent && (may_speak_yet || node.last_heard > begun_);
  });
}

bool Members::Leave(uint32_t node) {
  if (nodes_[node].state != State::kPresent) return false;
  nodes_[node].state = State::kLeft;
  --present_;
  return true;
}

bool Members::CanLose(uint32_t node) const {
  const auto is_lost = [](const Node& each) { return each.state == State::kLost; };
  const auto lost = std::count_if(nodes_.begin(), nodes_.end(), is_lost);
  return min_nodes_ > 0 && IsComplete() && !is_lost(nodes_[node]) &&
         nodes_.size() - static_cast<size_t>(lost) > min_nodes_;
}

Members::Change Members::SetLost(uint32_t node, const std::string& why) {
  Leave(node);
  nodes_[node].state = State::kLost;
  nodes_[node].lost_because = why;
  Change change{++epoch_, {}, {}};
  for (uint32_t each = 0; each < nodes_.size(); ++each) {
    if (nodes_[each].state != State::kLost) change.active.push_back(each);
  }
  change.why = absl::StrCat("epoch ", epoch_, " has ", change.active.size(), " of ", nodes_.size(),
                            " nodes: ", why);
  return change;
}

std::vector<LostNode> Members::Lost() const {
  std::vector<LostNode> lost;
  for (const Node& member : nodes_) {
    if (member.state == State::kLost) lost.push_back({member.name, member.lost_because});
  }
  return lost;
}

absl::Status Members::Hear(uint32_t node, TimePoint now) {
  const absl::Status active = CheckActive(node);
  if (active.ok()) nodes_[node].last_heard = now;
  return active;
}

absl::Status Members::CheckActive(uint32_t node) const {
  if (!IsComplete()) return absl::FailedPreconditionError("the job is not complete yet");
  const Node& member = nodes_[node];
  if (member.state == State::kLeft) return absl::NotFoundError("this node has left the job");
  if (member.state != State::kLost) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("the job goes on without this node: ", member.lost_because));
}

absl::Status Members::CheckGroup(const Group& group) const {
  for (const GroupMember& member : group.members) {
    if (member.node >= nodes_.size() || member.workers <= nodes_[member.node].workers) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(ToString(group), ": ", Name(member.node), " has ", nodes_[member.node].workers,
                     nodes_[member.node].workers == 1 ? " worker" : " workers"));
  }
  return absl::OkStatus();
}

absl::Status Members::CheckNoneLeft() const {
  for (const Node& member : nodes_) {
    if (member.state != State::kLeft) continue;
    return absl::AbortedError(absl::StrCat(member.name, " has left the job"));
  }
  return absl::OkStatus();
}

absl::Status Members::Blame(uint32_t node, const absl::Status& reason) const {
  const absl::Status failure =
      IsOfJob(job_, reason)
          ? reason
          : absl::Status(reason.code(), absl::StrCat(Name(node), ": ", reason.message()));
  // To a sink, NotFound would mean that this shard has been restarted.
  return absl::IsNotFound(failure) ? absl::AbortedError(failure.message()) : failure;
}

std::vector<Members::Finding> Members::Silent(TimePoint now, TimePoint awake_since) const {
  std::vector<Finding> silent;
  if (!IsComplete()) return silent;  // they wait for each other
  for (uint32_t node = 0; node < nodes_.size(); ++node) {
    const Node& member = nodes_[node];
    const TimePoint heard = std::max(member.last_heard, awake_since);
    if (member.state != State::kPresent || now - heard <= member.lease) continue;
    silent.push_back(
        {node, absl::UnavailableError(absl::StrCat(member.name, " has sent nothing for ",
                                                   ToSeconds(member.lease), " s"))});
  }
  return silent;
}

std::vector<uint32_t> Members::Workers() const {
  std::vector<uint32_t> workers;
  for (const Node& member : nodes_) workers.push_back(member.workers);
  return workers;
}

std::string Members::Names(const std::vector<uint32_t>& nodes) const {
  return absl::StrJoin(
      nodes, ", ", [this](std::string* text, uint32_t node) { absl::StrAppend(text, Name(node)); });
}

std::string Members::Missing() const {
  std::vector<uint32_t> missing;
  for (uint32_t node = 0; node < nodes_.size(); ++node) {
    if (nodes_[node].state == State::kAwaited) missing.push_back(node);
  }
  return absl::StrCat(missing.size() == 1 ? "node " : "nodes ", absl::StrJoin(missing, ", "),
                      " of ", nodes_.size());
}

}  // namespace thalweg
