// NodeStreams holds the streams of one membership on the aggregator's side. Together they are the
// node: what happens to one stream happens to the node. Only a stream that breaks may be opened
// again, until the shard's lease of the node is over.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "core/base/mutex.h"
#include "core/exchange/served_shard.h"
#include "server/transport/received_frames.h"
#include "server/transport/sent_frames.h"
#include "server/transport/stream_counters.h"
#include "server/transport/wire/frame_codec.h"
#include "server/transport/wire/session_token.h"

namespace thalweg {

class NodeTable;
class ServerStream;

// A NodeStreams is thread-safe. Its streams share ownership, and the table and the shard while it
// is a member: a node whose streams have all broken can come back. It calls neither the shard nor
// gRPC under its lock.
class NodeStreams final : public ServedNode {
 public:
  struct Key {
    SessionToken token = 0;
    // What its streams must prove. One that has proved another identity than the token's owner
    // belongs to another node, and ends without touching the owner.
    std::string identity = {};
    std::string principal = {};  // see ServedShard::HasPolicy; empty: any caller may show the token
    Duration lease = kLease;     // the shard's
  };

  // `table` must outlive the object.
  NodeStreams(Key key, NodeTable& table);

  const Key& key() const { return key_; }
  // Call once, before the table has the node.
  void Begin(std::unique_ptr<Member> member) { member_ = std::move(member); }
  Member& member() { return *member_; }

  // Adds the stream as number open.stream; called by the NodeTable. One that is opened again takes
  // the place of its earlier incarnation, and sends what that has not delivered. Returns
  // InvalidArgument when the number of streams differs from the first stream's, or when more
  // results are said to have been received than were sent; AlreadyExists when that stream is open
  // in this incarnation or a later one.
  absl::Status Add(const OpenFrame& open, const std::shared_ptr<ServerStream>& stream);
  // Removes a stream whose gRPC operations have all completed.
  void Remove(uint32_t index, const ServerStream& stream);
  // Passes on a contribution. Does nothing if `from` is not the latest incarnation: the chunk will
  // come again.
  absl::Status Contribute(uint32_t index, const ServerStream& from, ChunkFrame chunk);
  // The node has received so many chunk frames of stream `index`. InvalidArgument: more than were
  // sent. Does nothing if `from` is not the latest incarnation.
  absl::Status Acknowledged(uint32_t index, const ServerStream& from, uint64_t received);
  // Ends all streams with `why`, then the membership; called when the peer broke the protocol or
  // the shard refused. In this order the node reads this reason and not the failure that its
  // leaving causes.
  void Refuse(const absl::Status& why);
  // Stream `index` cannot be read any more, either because we ended it with `end`, or because the
  // peer did, or because it broke. If it may be opened again, ends only this stream; otherwise the
  // membership too, and the other streams. The shard knows whether the node left in good order.
  void Lost(uint32_t index, ServerStream& stream, const absl::Status& end);

  // Ends the membership, as Member::Leave does, and the table's entry unless streams that still
  // come must be told how the node has ended. Idempotent.
  void Leave(const absl::Status& reason);
  // Says whether the node has been without a stream for so long that it has to leave; see
  // NodeTable.
  bool IsGone(TimePoint now) const;

  void OnResult(RoundResult result) override;
  uint32_t Backlog() const override;
  Kept KeptResults(uint32_t chunk) const override;
  uint64_t Reconnections() const override;
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
    ReceivedFrames received;   // contributions
  };

  absl::Status CheckLocked(const OpenFrame& open) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns whether the result is a letter whose stream has not opened yet, and keeps it if so.
  bool KeepEarlyLocked(const RoundResult& result) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Takes out the letters that came before stream `index`, as frames in their order.
  std::vector<grpc::ByteBuffer> TakeEarlyLocked(uint32_t index)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Ends all streams, present and future, unless the node has ended already.
  void EndAll(const End& end);
  static void EndOne(ServerStream& stream, const End& end);
  // Returns true to the one caller that must call EndMembership. Ask before ending streams: their
  // ends are reasons to leave too, but not the first.
  bool BeginLeave();
  void EndMembership(const absl::Status& reason);
  bool HadStreamLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool HasStreamLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Key key_;
  NodeTable& table_;
  const StreamCounters counters_;
  std::unique_ptr<Member> member_;

  mutable Mutex mutex_;
  std::vector<Lane> lanes_ ABSL_GUARDED_BY(mutex_);  // none before the first stream opens
  // Letters that came before their stream; the job bounds their bytes.
  std::vector<RoundResult> early_ ABSL_GUARDED_BY(mutex_);
  TimePoint streamless_since_ ABSL_GUARDED_BY(mutex_) = Now();  // counts when there is no stream
  std::optional<End> end_ ABSL_GUARDED_BY(mutex_);
  bool has_left_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t reconnections_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace thalweg
