#include "server/round/membership.h"

#include <numeric>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace thalweg {
namespace {

std::string SilentFor(const Members::Member& member, Duration time) {
  return absl::StrCat(member.name, " has sent nothing for ", ToSeconds(time), " s");
}

}  // namespace

Members::Members(const JoinRequest& first)
    : job_(first.job), world_size_(first.world_size), members_(first.num_nodes) {}

absl::Status Members::CheckSeat(const JoinRequest& request) const {
  const Member& member = members_[request.node];
  if (member.state == State::kAwaited) return absl::OkStatus();
  return absl::AlreadyExistsError(absl::StrCat("job '", job_, "' has a node ", request.node,
                                               " already: ", member.name, "; the newcomer is ",
                                               request.node_name));
}

absl::Status Members::CheckWorkers(const JoinRequest& request) const {
  if (joined_ + 1 < members_.size()) return absl::OkStatus();
  const uint32_t workers =
      std::accumulate(members_.begin(), members_.end(), request.workers,
                      [](uint32_t sum, const Member& m) { return sum + m.workers; });
  if (workers == world_size_) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "its nodes have ", workers, " workers together, but the world size is ", world_size_));
}

void Members::Join(const JoinRequest& request, TimePoint now) {
  Member& member = members_[request.node];
  member.state = State::kPresent;
  member.name = absl::StrCat("node ", request.node, " (", request.node_name, ")");
  member.host = request.node_name;
  member.workers = request.workers;
  member.last_heard = now;
  ++joined_;
  ++present_;
}

void Members::Begin(TimePoint now) {
  complete_since_ = now;
  for (Member& member : members_) member.last_heard = now;
}

bool Members::Leave(uint32_t node) {
  if (members_[node].state != State::kPresent) return false;
  members_[node].state = State::kLeft;
  --present_;
  return true;
}

Members::Change Members::SetLost(uint32_t node, const std::string& why) {
  Leave(node);
  members_[node].state = State::kLost;
  members_[node].lost_because = why;
  Change change{++epoch_, {}, {}};
  for (uint32_t each = 0; each < members_.size(); ++each) {
    if (members_[each].state != State::kLost) change.active.push_back(each);
  }
  change.why = absl::StrCat("epoch ", epoch_, " has ", change.active.size(), " of ",
                            members_.size(), " nodes: ", why);
  return change;
}

absl::Status Members::CheckActive(uint32_t node) const {
  if (!IsComplete()) return absl::FailedPreconditionError("the job is not complete yet");
  const Member& member = members_[node];
  if (member.state == State::kLeft) return absl::NotFoundError("this node has left the job");
  if (member.state != State::kLost) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("the job goes on without this node: ", member.lost_because));
}

absl::Status Members::CheckNoneLeft() const {
  for (const Member& member : members_) {
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

std::vector<Members::Finding> Members::Silent(TimePoint now) const {
  std::vector<Finding> silent;
  if (!IsComplete()) return silent;  // they wait for each other
  for (uint32_t node = 0; node < members_.size(); ++node) {
    const Member& member = members_[node];
    if (member.state != State::kPresent || now - member.last_heard <= kLease) continue;
    silent.push_back({node, absl::UnavailableError(SilentFor(member, kLease))});
  }
  return silent;
}

std::vector<Members::Finding> Members::Gone(TimePoint now) const {
  std::vector<Finding> gone;
  if (!IsComplete()) return gone;
  for (uint32_t node = 0; node < members_.size(); ++node) {
    const Member& member = members_[node];
    if (member.state != State::kPresent) continue;
    const Duration limit = member.has_stream ? kGoneTime : kLease;
    if (now - member.last_heard > limit) {
      gone.push_back({node, absl::UnavailableError(SilentFor(member, limit))});
    } else if (!member.has_stream && now - complete_since_ > kGoneTime) {
      gone.push_back({node, absl::UnavailableError(absl::StrCat(
                                member.name, " has opened no stream to this shard in the ",
                                ToSeconds(kGoneTime), " s since the job began"))});
    }
  }
  return gone;
}

std::vector<uint32_t> Members::Workers() const {
  std::vector<uint32_t> workers;
  for (const Member& member : members_) workers.push_back(member.workers);
  return workers;
}

std::string Members::Names(const std::vector<uint32_t>& nodes) const {
  return absl::StrJoin(
      nodes, ", ", [this](std::string* text, uint32_t node) { absl::StrAppend(text, Name(node)); });
}

std::string Members::Missing() const {
  std::vector<uint32_t> missing;
  for (uint32_t node = 0; node < members_.size(); ++node) {
    if (members_[node].state == State::kAwaited) missing.push_back(node);
  }
  return absl::StrCat(missing.size() == 1 ? "node " : "nodes ", absl::StrJoin(missing, ", "),
                      " of ", members_.size());
}

}  // namespace thalweg
