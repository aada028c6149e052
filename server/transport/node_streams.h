// NodeStreams holds the streams of one membership on the aggregator's side. Together they are the
// node's NodeSink: what happens to one stream happens to the node. Only a stream that breaks may be
// opened again, until the shard's lease of the node is over.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "core/base/exchange.h"
#include "core/base/mutex.h"
#include "server/transport/frame_codec.h"
#include "server/transport/sent_frames.h"
#include "server/transport/stream_counters.h"

namespace thalweg {

class ServerStream;

// A NodeStreams is thread-safe. Its streams share ownership, and the shard for as long as it likes:
// a node whose streams have all broken can come back while it is a member. It calls neither the
// shard nor gRPC under its lock.
class NodeStreams final : public NodeSink, public std::enable_shared_from_this<NodeStreams> {
 public:
  // A Key names the node of a stream. A stream that has proved another identity than the token's
  // owner belongs to another node, and ends without touching the owner.
  struct Key {
    SessionToken token = 0;
    std::string identity = {};
    auto operator<=>(const Key&) const = default;
  };

  NodeStreams(Key key, uint32_t num_streams, Shard& shard, StreamCounters counters)
      : key_(std::move(key)),
        num_streams_(num_streams),
        shard_(shard),
        counters_(counters),
        lanes_(num_streams) {}

  const Key& key() const { return key_; }

  // Adds the stream as number open.stream; called by the NodeTable. One that is opened again takes
  // the place of its earlier incarnation, and sends what that has not delivered. Returns
  // InvalidArgument when the number of streams differs from the first stream's, or when more
  // results are said to have been received than were sent; AlreadyExists when that stream is open
  // in this incarnation or a later one.
  absl::Status Add(const OpenFrame& open, const std::shared_ptr<ServerStream>& stream);
  // Removes a stream whose gRPC operations have all completed; called by the NodeTable. Returns
  // true when no stream is left and none may be opened again.
  bool Remove(uint32_t index, const ServerStream& stream);

  // If stream `index` is the node's first, attaches the node to the shard; otherwise waits until
  // the first stream has done so. All streams get the shard's refusal.
  absl::Status Begin(uint32_t index);
  // Does nothing if `from` is not the latest incarnation: the chunk will come again.
  absl::Status Contribute(uint32_t index, const ServerStream& from, ChunkFrame chunk);
  // Ends all streams with `why`, then the membership; called when the peer broke the protocol or
  // the shard refused. In this order the node reads this reason and not the failure that its
  // leaving causes.
  void Refuse(const absl::Status& why);
  // Stream `index` cannot be read any more, either because we ended it with `end`, or because the
  // peer did, or because it broke. If it may be opened again, ends only this stream; otherwise the
  // membership too, and the other streams. The shard knows whether the node left in good order.
  void Lost(uint32_t index, ServerStream& stream, const absl::Status& end);

  void OnResult(RoundResult result) override;
  uint32_t Backlog() const override;
  void OnFailed(absl::Status why) override;

 private:
  // An End describes how the node ended.
  struct End {
    absl::Status why;
    bool by_shard = false;  // `why` is the shard's, and is sent as a failure frame
  };

  // A Lane is one stream, all incarnations together.
  struct Lane {
    // Null before the stream opens, while it is broken, and after gRPC has completed it.
    std::shared_ptr<ServerStream> stream;
    bool was_open = false;
    uint32_t incarnation = 0;  // of the latest; 0: the stream cannot be opened again
    SentFrames sent;           // empty if it cannot
    uint64_t received = 0;     // contributions
  };

  absl::Status CheckLocked(const OpenFrame& open) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Ends all streams, present and future, unless the node has ended already.
  void EndAll(const End& end);
  static void EndOne(ServerStream& stream, const End& end);
  // Returns true to the one caller that must call Shard::Leave. Ask before ending streams: their
  // ends are reasons to leave too, but not the first.
  bool BeginLeave();

  const Key key_;
  const uint32_t num_streams_;
  Shard& shard_;
  const StreamCounters counters_;

  mutable Mutex mutex_;
  CondVar changed_;
  std::vector<Lane> lanes_ ABSL_GUARDED_BY(mutex_);
  bool attaching_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<absl::Status> attached_ ABSL_GUARDED_BY(mutex_);  // the shard's answer
  std::optional<End> end_ ABSL_GUARDED_BY(mutex_);
  bool has_left_ ABSL_GUARDED_BY(mutex_) = false;
};

// A NodeTable holds the nodes that have streams. It is thread-safe.
class NodeTable {
 public:
  // The references must outlive the table.
  NodeTable(Shard& shard, StreamCounters counters) : shard_(shard), counters_(counters) {}

  // Returns the node that the stream belongs to; creates it for its first stream. Requires that the
  // frame's proof has been checked.
  absl::StatusOr<std::shared_ptr<NodeStreams>> Admit(const OpenFrame& open,
                                                     const std::shared_ptr<ServerStream>& stream);
  // Removes the stream, whose gRPC operations have all completed.
  void Release(NodeStreams& node, uint32_t index, const ServerStream& stream);

  const StreamCounters& counters() const { return counters_; }

 private:
  Shard& shard_;
  const StreamCounters counters_;

  // This lock is held during Add and Remove, so that no stream joins a node that is being removed.
  Mutex mutex_;
  // A node that nobody owns any more has gone; its entry is erased when the next one comes.
  std::map<NodeStreams::Key, std::weak_ptr<NodeStreams>> nodes_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace thalweg
