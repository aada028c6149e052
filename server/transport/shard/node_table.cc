#include "server/transport/shard/node_table.h"

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"

namespace thalweg {
namespace {

SessionToken NewToken() {
  std::random_device device;
  SessionToken token = 0;
  while (token == 0) token = (static_cast<uint64_t>(device()) << 32) | device();
  return token;
}

}  // namespace

std::shared_ptr<NodeStreams> NodeTable::Make(std::string identity, std::string principal,
                                             Duration lease) {
  return std::make_shared<NodeStreams>(
      NodeStreams::Key{NewToken(), std::move(identity), std::move(principal), lease}, *this);
}

void NodeTable::Add(const std::shared_ptr<NodeStreams>& node, std::unique_ptr<Member> member) {
  node->Begin(std::move(member));
  MutexLock lock(mutex_);
  nodes_[node->key().token] = node;
}

absl::StatusOr<std::shared_ptr<NodeStreams>> NodeTable::Find(SessionToken token) {
  MutexLock lock(mutex_);
  const auto found = nodes_.find(token);
  if (found != nodes_.end()) return found->second;
  // NotFound would tell the node that the shard has been restarted.
  if (std::find(expired_.begin(), expired_.end(), token) != expired_.end()) {
    return absl::AbortedError(
        "this membership has ended, and its job with it: the node had no stream for too long");
  }
  return absl::NotFoundError("no such membership: it has ended, or the shard has been restarted");
}

absl::StatusOr<std::shared_ptr<NodeStreams>> NodeTable::Admit(
    const OpenFrame& open, const std::shared_ptr<ServerStream>& stream) {
  if (open.num_streams == 0 || open.num_streams > kMaxStreams || open.stream >= open.num_streams) {
    return absl::InvalidArgumentError(absl::StrCat("node opened stream ", open.stream, " of ",
                                                   open.num_streams, ", expected 1 to ",
                                                   kMaxStreams, " streams, counted from 0"));
  }
  THALWEG_ASSIGN_OR_RETURN(const std::shared_ptr<NodeStreams> node, Find(open.token));
  if (open.identity != node->key().identity) {
    return absl::PermissionDeniedError(
        "the stream has proved another secret than that of the node's job, or none");
  }
  THALWEG_RETURN_IF_ERROR(node->Add(open, stream));
  return node;
}

void NodeTable::Forget(SessionToken token) {
  std::shared_ptr<NodeStreams> node;  // released outside the lock
  MutexLock lock(mutex_);
  if (auto entry = nodes_.extract(token)) node = std::move(entry.mapped());
}

void NodeTable::Expire(TimePoint now) {
  std::vector<std::shared_ptr<NodeStreams>> gone;
  {
    MutexLock lock(mutex_);
    for (const auto& [token, node] : nodes_) {
      if (node->IsGone(now)) gone.push_back(node);
    }
  }
  for (const auto& node : gone) {
    {
      MutexLock lock(mutex_);
      expired_.push_back(node->key().token);
      if (expired_.size() > kMostExpired) expired_.pop_front();
    }
    node->Leave(absl::UnavailableError("it has no stream to this shard any more, or never had"));
    Forget(node->key().token);
  }
}

void NodeTable::Close(const absl::Status& why) {
  std::map<SessionToken, std::shared_ptr<NodeStreams>> nodes;
  {
    MutexLock lock(mutex_);
    nodes.swap(nodes_);
  }
  for (const auto& [token, node] : nodes) node->Leave(why);
}

}  // namespace thalweg
