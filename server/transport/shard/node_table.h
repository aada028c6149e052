// NodeTable holds the nodes of other machines that are members here, by the tokens that their calls
// and streams show.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/clock.h"
#include "core/base/mutex.h"
#include "core/exchange/member.h"
#include "server/transport/shard/node_streams.h"
#include "server/transport/stream_counters.h"
#include "server/transport/wire/frame_codec.h"
#include "server/transport/wire/session_token.h"

namespace thalweg {

class ServerStream;

// A NodeTable is thread-safe. It keeps a node until the node leaves in good order, or is expired.
class NodeTable {
 public:
  // A node without any stream loses its membership after kGoneTime, or after kLease if its job has
  // ended; one whose streams have broken after its lease at the earliest. Until then it may come
  // back and be told why.
  static constexpr Duration kGoneTime = 3 * kLease;

  explicit NodeTable(StreamCounters counters) : counters_(counters) {}

  // Makes a node with a new token that is to join a shard and then to be added; its streams must
  // prove `identity`, and its calls and streams come from the certificate `principal`, if any.
  std::shared_ptr<NodeStreams> Make(std::string identity, std::string principal,
                                    Duration lease = kLease);
  // Adds the node, which has joined.
  void Add(const std::shared_ptr<NodeStreams>& node, std::unique_ptr<Member> member);
  // Returns the node; NotFound if it has left or this process has never known it, Aborted if it is
  // one of the last kMostExpired that have expired. A shard has no more nodes: not even all at once
  // push each other out.
  static constexpr size_t kMostExpired = 16'384;
  absl::StatusOr<std::shared_ptr<NodeStreams>> Find(SessionToken token);
  // Gives the stream to its node and returns the node. Requires that the frame's proof has been
  // checked. PermissionDenied: what it proves is not the node's identity; and as NodeStreams::Add.
  absl::StatusOr<std::shared_ptr<NodeStreams>> Admit(const OpenFrame& open,
                                                     const std::shared_ptr<ServerStream>& stream);
  // Called by a node that leaves.
  void Forget(SessionToken token);

  // Ends the memberships of nodes that have been without a stream for too long.
  void Expire(TimePoint now);
  // Ends all memberships.
  void Close(const absl::Status& why);

  const StreamCounters& counters() const { return counters_; }

 private:
  const StreamCounters counters_;
  Mutex mutex_;
  std::map<SessionToken, std::shared_ptr<NodeStreams>> nodes_ ABSL_GUARDED_BY(mutex_);
  std::deque<SessionToken> expired_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace thalweg
